// The page: puts the conversation, the settings and the server together.

import { Api, ApiError, GoneError, Received } from "./api.js";
import { Conversation, STORAGE_KEY } from "./conversation.js";
import { Images } from "./images.js";
import { copyButton, element } from "./render.js";
import { Settings, numbersOf } from "./settings.js";
import { AnswerTurn, UserTurn, isSend } from "./turn.js";
import { compared, contextOf, count, countsOf, curl, endOf, isFull, sdk, sizeOf } from "./words.js";

const EXAMPLES = [
  "what does os.path.join do?",
  "how do i use itertools.chain?",
  'remove the docstring:\n```python\ndef read_all(paths):\n    """Read the files at paths and return their texts."""\n    texts = []\n    for path in paths:\n        with open(path) as file:\n            texts.append(file.read())\n    return texts\n```',
];
const SESSION_KEY = "mlxspec.key";
const SAVE_MS = 1000;
const [FIRST_RETRY_MS, LAST_RETRY_MS] = [1000, 15_000];
const UNKNOWN = "the server's model";

const byId = (id) => document.getElementById(id);
const question = byId("question");

const storage = storageOf("localStorage");
const session = storageOf("sessionStorage");
const settings = new Settings(storage);
const conversation = new Conversation(storage);
const api = new Api(new URL(".", document.baseURI).href, session?.getItem(SESSION_KEY) ?? "");

let models = [];
let running = null; // the AbortController of the request in progress
let active = null; // the turn that it is about
let isLeaving = false; // whether the browser goes to another page
let spoken = 0; // blocks of the current answer that have been announced
const views = new WeakMap(); // of each turn its UserTurn or AnswerTurn

/** A storage of the browser, or null where it is switched off. */
function storageOf(name) {
  try {
    return window[name];
  } catch {
    return null;
  }
}

// ---- the server: models, key, whether it answers

async function connect() {
  try {
    models = await api.models();
    await untilReady();
    banner("");
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) askForKey(api.key ? "The server does not accept this key." : "");
    else if (error instanceof GoneError) await waitForServer();
    else banner(error.message, "Try again", connect);
  }
  showModels();
}

/** Wait while the server loads its model. */
async function untilReady() {
  for (;;) {
    try {
      await api.health();
      models = await api.models();
      return;
    } catch (error) {
      if (!(error instanceof ApiError) || error.code !== "loading") throw error;
      banner("The server is loading its model.");
      await pause(FIRST_RETRY_MS);
    }
  }
}

let isWaiting = false;

/** The server does not answer: ask again now and then until it does. */
async function waitForServer() {
  if (isWaiting) return;
  isWaiting = true;
  for (let wait = FIRST_RETRY_MS; ; wait = Math.min(2 * wait, LAST_RETRY_MS)) {
    banner("The server does not answer. The page asks again every few seconds; the conversation is kept.");
    await pause(wait);
    try {
      await api.health();
      break;
    } catch (error) {
      if (error instanceof ApiError) break; // it answers, if only with an error
    }
  }
  isWaiting = false;
  await connect();
  if (byId("banner").hidden) notify("The server answers again.");
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

function currentModel() {
  return models.find((model) => model.id === settings.values.model) ?? models[0] ?? null;
}

function modelName() {
  return currentModel()?.id ?? UNKNOWN;
}

/** Tokens of a model's context, null where that is not known. */
function contextSize(name = modelName()) {
  return models.find((model) => model.id === name)?.meta.n_ctx ?? null;
}

function showModels() {
  const model = currentModel();
  const select = byId("model");
  select.hidden = models.length < 2;
  byId("model-name").hidden = models.length > 1;
  byId("model-name").textContent = modelName();
  select.replaceChildren(...models.map(({ id }) => element("option", { value: id, selected: id === model?.id }, id)));
  byId("model-facts").textContent = facts(model?.meta);
  byId("attach").hidden = !sees();
  document.title = `${modelName()} · mlxspec`;
  showContext();
}

function facts(meta) {
  if (!meta) return "";
  if (!meta.loaded) return "loaded with the first message";
  const drafting = meta.draft.length ? `drafting: ${meta.draft.join(", ")}` : "no drafting";
  return `${count(meta.n_ctx, "token")} of context · ${drafting}`;
}

function askForKey(sentence) {
  banner("The server asks for an API key.", "Enter the key", () => askForKey(""));
  byId("key-error").textContent = sentence;
  byId("key").value = "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (!key) {
    byId("key-error").textContent = "The key is empty.";
    return;
  }
  api.key = key;
  try {
    session?.setItem(SESSION_KEY, key);
  } catch {
    // it is asked for again after a reload
  }
  byId("key-dialog").close();
  connect();
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());

// ---- sentences about the state of things

function banner(sentence, action = "", onclick = null) {
  byId("banner").hidden = !sentence;
  byId("banner-text").textContent = sentence;
  const button = byId("banner-button");
  button.hidden = !action;
  button.textContent = action;
  button.onclick = onclick;
}

function notify(sentence) {
  byId("notice-text").textContent = sentence;
  byId("undo").hidden = !sentence || !conversation.canUndo;
  byId("notice").classList.toggle("said", Boolean(sentence));
}

/** Have a screen reader say it, without moving anything. */
function say(sentence) {
  const said = element("p", {}, sentence);
  byId("said").append(said);
  setTimeout(() => said.remove(), 10_000);
}

function showContext() {
  const last = conversation.turns.at(-1);
  byId("context").textContent = contextOf(last?.counts, contextSize(last?.model));
}

// ---- the conversation

/** Elements that are there already stay where they are, and with them selection, focus and what was unfolded. */
function showConversation() {
  const turns = byId("turns");
  conversation.turns.forEach((turn, number) => {
    const { article } = viewOf(turn, number);
    if (turns.children[number] !== article) turns.insertBefore(article, turns.children[number] ?? null);
  });
  while (turns.children.length > conversation.turns.length) turns.lastChild.remove();
  byId("empty").hidden = conversation.turns.length > 0;
  byId("new").disabled = conversation.turns.length === 0;
  showContext();
}

/** The view of a turn, with the buttons that make sense now. */
function viewOf(turn, number) {
  let view = views.get(turn);
  if (!view) {
    view = turn.role === "user" ? new UserTurn(turn, number, (text) => edit(number, text, turn.images)) : new AnswerTurn(number, turn.model ?? UNKNOWN);
    views.set(turn, view);
  }
  if (turn.role === "user") view.allow(!running);
  else if (turn !== active) showFinished(view, turn, number);
  return view;
}

function showFinished(view, turn, number) {
  const isLast = number === conversation.turns.length - 1;
  const isWhole = ["stop", "length", "context"].includes(turn.end);
  view.finished(turn, {
    context: contextSize(turn.model),
    regenerate: isLast && !running ? () => regenerate(number) : null,
    compare: isWhole && !running && turn.counts?.tokens ? () => compare(turn, number) : null,
  });
}

function keep() {
  if (!conversation.save()) notify("The browser does not keep this conversation: its storage is full or switched off.");
}

function send(text, urls = []) {
  conversation.settle();
  notify("");
  conversation.add(userTurn(text, urls));
  return answer();
}

/** A turn of the user. */
function userTurn(text, urls) {
  return { role: "user", text, ...(urls?.length ? { images: urls } : {}) };
}

function edit(number, text, urls) {
  if (running) return null;
  const hasMore = conversation.turns.length > number + 2;
  conversation.cut(number);
  conversation.add(userTurn(text, urls));
  notify(hasMore ? "The turns behind the edited message were removed." : "The message was edited.");
  return answer();
}

async function regenerate(number) {
  const before = conversation.turns[number];
  conversation.cut(number);
  notify("");
  const turn = await answer();
  if (turn.end === "stop" && turn.text === before.text && turn.thought === before.thought) {
    notify("The same answer came again. Above temperature 0 each answer is drawn anew.");
  } else if (isUseful(before)) notify("The earlier answer was replaced.");
}

function isUseful(turn) {
  return Boolean(turn.text || turn.thought);
}

/** Ask for the answer to the last message. */
async function answer() {
  const number = conversation.turns.length;
  const model = currentModel()?.id;
  const seed = crypto.getRandomValues(new Uint32Array(1))[0];
  const asked = { ...(model ? { model } : {}), ...settings.fields(seed), ...systemOf() };
  const turn = conversation.add({
    role: "assistant", model: model ?? UNKNOWN, asked, text: "", thought: "", marks: [], thoughtMarks: [], notices: [], end: "cut", counts: null,
  });
  begin(turn);
  const view = views.get(turn);
  view.running("Waiting for the server.");
  scrollToEnd();
  say("The model answers.");
  spoken = 0;
  await follow(requestOf(asked, number), turn, view, running.signal);
  finish();
  speak(view.text(turn, false), true);
  say(endOf(turn, contextSize(turn.model)) || "The answer is complete.");
  return turn;
}

function systemOf() {
  return settings.values.system.trim() ? { system: settings.values.system } : {};
}

/** The body of a request. asked: its fields, the system prompt among them. number: of the turn that is to be answered. */
function requestOf(asked, number) {
  const { system, ...fields } = asked;
  return {
    ...fields,
    messages: conversation.messages(number, system),
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
    timings_per_token: true,
    return_drafted: true,
  };
}

/** Read a streamed answer into a turn and show it as it comes. Raises nothing: what went wrong stands in the turn. */
async function follow(body, turn, view, signal) {
  const received = new Received();
  let drawn = 0;
  let saved = performance.now();
  const draw = () => {
    drawn = 0;
    const isAtEnd = atEnd();
    speak(view.text(received, true));
    view.running(stateOf(received));
    if (isAtEnd) scrollToEnd();
  };
  try {
    for await (const chunk of api.chat(body, signal)) {
      received.take(chunk);
      Object.assign(turn, wordsOf(received));
      drawn ||= requestAnimationFrame(draw);
      if (performance.now() - saved > SAVE_MS) {
        conversation.save();
        saved = performance.now();
      }
    }
    if (received.reason === "length" && !contextSize(turn.model)) await refreshFacts();
    const isAtContext = received.reason === "length" && isFull(countsOf(received), contextSize(turn.model));
    turn.end = isAtContext ? "context" : (received.reason ?? "stop");
  } catch (error) {
    turn.end = signal.aborted ? "stopped" : isLeaving ? "cut" : "failed"; // a page that is left loses its connections
    if (turn.end === "failed") blame(turn, error);
  }
  cancelAnimationFrame(drawn);
  Object.assign(turn, wordsOf(received), { counts: received.timings ? countsOf(received) : null, notices: received.notices });
}

function wordsOf({ text, thought, marks, thoughtMarks }) {
  return { text, thought, marks, thoughtMarks };
}

/** Put into a turn why it failed, and look after the server. */
function blame(turn, error) {
  turn.error = error.message;
  if (error instanceof GoneError) waitForServer();
  else if (!(error instanceof ApiError)) {
    turn.error = `This page made a mistake: ${error.message}`;
    console.error(error);
  } else if (error.status === 401) askForKey("The server does not accept this key.");
  else if (error.code === "context_length_exceeded") turn.error += " Start a new conversation, or edit an earlier message.";
}

function stateOf({ text, thought, progress, timings }) {
  if (timings) return sizeOf(countsOf({ timings }));
  if (progress && !text && !thought) return `Reading the prompt: ${progress.processed} of ${count(progress.total, "token")}.`;
  return "Waiting for the first token.";
}

/** Announce blocks that are complete. */
function speak(blocks, isWhole = false) {
  for (; spoken < blocks.length - (isWhole ? 0 : 1); spoken += 1) say(blocks[spoken]);
}

/** Send the same request with drafting switched the other way, and say what differs. */
async function compare(turn, number) {
  const wasOff = turn.asked.draft === "off";
  const { draft, ...fields } = turn.asked;
  const asked = wasOff ? fields : { ...fields, draft: "off" };
  const other = new Received();
  const view = views.get(turn);
  const how = wasOff ? "with" : "without";
  begin(turn);
  const { signal } = running;
  view.running(`The same request runs ${how} drafting.`);
  say(`The same request runs ${how} drafting.`);
  keepFocus();
  try {
    for await (const chunk of api.chat(requestOf(asked, number), signal)) {
      other.take(chunk);
      if (other.timings) view.running(`The same request ${how} drafting: ${sizeOf(countsOf(other))}`);
    }
    const pair = [turn, { ...wordsOf(other), counts: countsOf(other) }];
    const { same, sentence } = compared(...(wasOff ? pair.reverse() : pair));
    turn.comparison = { same, sentence, other: same ? "" : other.text };
    say(sentence);
  } catch (error) {
    const failed = { error: "" };
    if (!signal.aborted) blame(failed, error);
    const sentence = failed.error ? `The comparison failed: ${failed.error}` : "You stopped the comparison.";
    turn.comparison = { same: false, sentence, other: "" };
  }
  finish();
}

// ---- while a request runs

/** turn: the answer that the request is about. */
function begin(turn) {
  running = new AbortController();
  active = turn;
  showConversation();
  byId("send").hidden = true;
  byId("stop").hidden = false;
  byId("new").disabled = true;
  byId("open-settings").disabled = true;
  byId("model").disabled = true;
  byId("undo").hidden = true;
  keepFocus();
}

/** Focus does not get lost with a button that was pressed and is gone. */
function keepFocus() {
  if (!document.activeElement || document.activeElement === document.body) byId("stop").focus();
}

/** The buttons as they are while nothing runs. Focus does not get lost with the button for stopping. */
function finish() {
  const wasFocused = document.activeElement === byId("stop");
  running = active = null;
  byId("send").hidden = false;
  byId("stop").hidden = true;
  byId("open-settings").disabled = false;
  byId("model").disabled = false;
  byId("undo").hidden = !conversation.canUndo;
  keep();
  const wasAtEnd = atEnd();
  showConversation();
  if (wasAtEnd) scrollToEnd();
  if (wasFocused) question.focus({ preventScroll: true });
  refreshFacts();
}

/** What is known of a model is known once it is loaded. */
async function refreshFacts() {
  if (currentModel()?.meta.loaded) return;
  try {
    models = await api.models();
    showModels();
  } catch {
    // the next request says what is wrong
  }
}

function stop() {
  running?.abort();
}

function atEnd() {
  const { scrollHeight, clientHeight, scrollTop } = document.scrollingElement;
  return scrollHeight - clientHeight - scrollTop < 80;
}

function scrollToEnd() {
  document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight;
}

// ---- fields and buttons

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value;
  if (running || reading || !(text.trim() || images.urls.length)) return;
  question.value = "";
  grow();
  send(text, images.take());
  question.focus({ preventScroll: true });
});

question.addEventListener("keydown", (event) => {
  if (isSend(event)) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
question.addEventListener("input", grow);

/** Images by the button, pasted into the field or dropped onto the page, where the model sees. */
const images = new Images(byId("images"), () => question.focus({ preventScroll: true }));
let reading = 0; // choices of files that are being read

function sees() {
  return currentModel()?.capabilities?.includes("vision") ?? false;
}

async function attach(files) {
  if (!files.length) return;
  if (!sees()) {
    notify("This model reads no images.");
    return;
  }
  reading += 1;
  notify(await images.add(files));
  reading -= 1;
}

byId("attach").addEventListener("click", () => byId("image-files").click());
byId("image-files").addEventListener("change", async (event) => {
  const files = [...event.target.files];
  event.target.value = ""; // the same file may be chosen again
  await attach(files);
});
question.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length) return;
  event.preventDefault();
  attach(files);
});
document.addEventListener("dragover", (event) => {
  if (event.dataTransfer.types.includes("Files")) event.preventDefault();
});
document.addEventListener("drop", (event) => {
  const files = [...event.dataTransfer.files];
  if (!files.length) return;
  event.preventDefault();
  attach(files);
});

/** The field is as high as its text where the browser does not do that by itself. */
function grow() {
  if (CSS.supports("field-sizing", "content")) return;
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
});

byId("new").addEventListener("click", () => {
  conversation.cut(0);
  keep();
  showConversation();
  notify("A new conversation has begun.");
  question.focus();
});

byId("undo").addEventListener("click", () => {
  conversation.undo();
  keep();
  showConversation();
  notify("The earlier turns are back.");
  question.focus();
});

byId("model").addEventListener("change", (event) => {
  settings.change({ model: event.target.value });
  showModels();
});

byId("examples").append(
  ...EXAMPLES.map((text) =>
    element("li", {}, element("button", { type: "button", onclick: () => { if (!running) send(text); } }, text)),
  ),
);

// ---- dialogs

function showTint() {
  document.body.classList.toggle("no-tint", !settings.values.colour);
}

byId("open-settings").addEventListener("click", () => {
  const { values } = settings;
  const meta = currentModel()?.meta;
  const names = meta?.drafters ?? [];
  const own = names.length ? `as the server does (${meta.draft.join(", ") || "off"})` : "as the server does";
  const options = [["", own], ["off", "off"], ...names.map((name) => [name, name])];
  byId("draft").replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  byId("draft").value = options.some(([value]) => value === values.draft) ? values.draft : "";
  byId("temperature").value = values.temperature ?? "";
  byId("max-tokens").value = values.max_tokens ?? "";
  byId("seed").value = values.seed ?? "";
  byId("thinking").value = values.thinking;
  byId("system").value = values.system;
  byId("colour").checked = values.colour;
  wrong(null, "");
  byId("settings").showModal();
});

function wrong(field, sentence) {
  byId("settings-error").textContent = sentence;
  for (const input of byId("settings-form").querySelectorAll("input[type=number]")) {
    input.setAttribute("aria-invalid", String(input.name === field));
    if (input.name === field) input.focus();
  }
}

byId("settings-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = (id) => (byId(id).validity.badInput ? "?" : byId(id).value);
  const found = numbersOf({ temperature: typed("temperature"), max_tokens: typed("max-tokens"), seed: typed("seed") });
  if (!found.values) {
    wrong(found.field, found.sentence);
    return;
  }
  const kept = settings.change({
    ...found.values,
    draft: byId("draft").value,
    thinking: byId("thinking").value,
    system: byId("system").value,
    colour: byId("colour").checked,
  });
  showTint();
  byId("settings").close();
  notify(kept ? "" : "The browser does not keep these settings: its storage is full or switched off.");
});
byId("settings-cancel").addEventListener("click", () => byId("settings").close());

byId("open-connect").addEventListener("click", () => {
  const base = `${api.base}v1`;
  byId("base").textContent = base;
  const shown = [
    ["Claude Code; codex and opencode too", `${api.key ? "MLXSPEC_API_KEY=KEY " : ""}mlxspec launch claude --port ${location.port || 80}`],
    ["From a terminal", curl(base, Boolean(api.key))],
    ["From Python, with the openai package", sdk(base, Boolean(api.key))],
  ];
  byId("snippets").replaceChildren(
    ...shown.map(([title, text]) =>
      element(
        "div",
        { class: "code snippet" },
        element("div", { class: "bar" }, element("span", {}, title), copyButton(() => text, `Copy: ${title}`)),
        element("pre", {}, element("code", {}, text)),
      ),
    ),
  );
  byId("connect").showModal();
});
byId("connect-close").addEventListener("click", () => byId("connect").close());

// ---- leaving, other tabs, start

window.addEventListener("beforeunload", () => {
  isLeaving = true;
});
window.addEventListener("pageshow", () => {
  isLeaving = false;
});
window.addEventListener("pagehide", () => {
  if (running) conversation.save(); // what has come of the answer; its turn says that it was cut
});

window.addEventListener("storage", (event) => {
  if (event.key !== STORAGE_KEY || running) return;
  conversation.reload();
  byId("turns").replaceChildren();
  showConversation();
});

showTint();
showConversation();
scrollToEnd();
question.focus({ preventScroll: true });
connect();
