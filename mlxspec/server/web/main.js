// The page: puts the conversation, the settings and the server together.

import { Api, ApiError, GoneError, Received } from "./api.js";
import { Attachments } from "./attachments.js";
import { Conversation, messageOf } from "./conversation.js";
import { onSettings, openConnect, openSettings } from "./dialogs.js";
import { asJson, asMarkdown, download, fileName } from "./export.js";
import { List } from "./list.js";
import { Models } from "./models.js";
import { byId, element } from "./render.js";
import { Server, UNKNOWN } from "./server.js";
import { Settings } from "./settings.js";
import { openStore } from "./store.js";
import { AnswerTurn, UserTurn, isSend } from "./turn.js";
import { compared, contextOf, count, countsOf, endOf, isFull, proofOf, sizeOf } from "./words.js";

const EXAMPLES = [
  "what does os.path.join do?",
  "how do i use itertools.chain?",
  'remove the docstring:\n```python\ndef read_all(paths):\n    """Read the files at paths and return their texts."""\n    texts = []\n    for path in paths:\n        with open(path) as file:\n            texts.append(file.read())\n    return texts\n```',
];
const [API_KEY, OPEN, TYPED] = ["mlxspec.key", "mlxspec.open", "mlxspec.typed"]; // what this tab keeps: the API key, the id of its conversation, a message that is not sent yet
const SAVE_MS = 500;
const NO_ANSWER = "The browser's storage does not answer. Export this conversation and load the page again.";
const KEEPS_NOTHING = "This browser keeps nothing here, so conversations are gone when the page is left.";

const question = byId("question");

const storage = storageOf("localStorage");
const session = storageOf("sessionStorage");
const settings = new Settings(storage);
const api = new Api(new URL(".", document.baseURI).href, session?.getItem(API_KEY) ?? "");
const server = new Server(api, settings, { notify, onmodels: showContext, onkey: (key) => remember(API_KEY, key) });

let conversation = new Conversation();
let store = null; // where conversations are kept, null where the browser keeps nothing
let list = null;
let keeping = Promise.resolve(); // one write at a time
const alive = new Set(); // conversations with a request in progress: their `run` is {controller, turn, spoken: blocks that were announced}
let isLeaving = false; // whether the browser goes to another page
const views = new WeakMap(); // of each turn its UserTurn or AnswerTurn

/** A storage of the browser, or null where it is switched off. */
function storageOf(name) {
  try {
    return window[name];
  } catch {
    return null;
  }
}

// ---- what is kept and said

/** Until this tab is closed, over reloads too, where the browser keeps that. */
function remember(key, value) {
  try {
    session.setItem(key, value);
  } catch {
    // a key is asked for again, and a reload begins a new conversation
  }
}

/** undo: brings back what the sentence says is gone. */
function notify(sentence, undo = null) {
  byId("notice-text").textContent = sentence;
  byId("undo").hidden = !undo;
  byId("undo").onclick = undo && (() => {
    notify("");
    undo();
    question.focus();
  });
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
  byId("context").textContent = contextOf(last?.counts, server.contextOf(last?.model));
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
  const isEmpty = conversation.turns.length === 0;
  byId("empty").hidden = !isEmpty;
  for (const id of ["export-markdown", "export-json"]) byId(id).disabled = isEmpty;
  for (const button of document.querySelectorAll(".new")) button.disabled = isEmpty;
  showContext();
}

/** The buttons as they are while a request of this conversation runs, or none. Focus does not get lost with one that is gone. */
function showRun() {
  const isRunning = Boolean(conversation.run);
  const hadFocus = document.activeElement === byId("stop");
  document.body.classList.toggle("busy", isRunning);
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
  byId("model").disabled = isRunning;
  byId("undo").hidden = isRunning || !byId("undo").onclick;
  if (isRunning) keepFocus();
  else if (hadFocus) question.focus({ preventScroll: true });
}

/** The view of a turn. Of 500 turns only those are drawn again of which something has changed. */
function viewOf(turn, number) {
  let view = views.get(turn);
  if (!view) {
    view = turn.role === "user" ? new UserTurn(turn, number, (text) => edit(number, text, turn.images)) : new AnswerTurn(number, turn.model ?? UNKNOWN);
    views.set(turn, view);
  }
  if (turn.role === "assistant" && turn !== conversation.run?.turn) showFinished(view, turn, number);
  return view;
}

function showFinished(view, turn, number) {
  const isLast = number === conversation.turns.length - 1;
  const isWhole = ["stop", "length", "context"].includes(turn.end);
  const context = server.contextOf(turn.model);
  const drawn = `${isLast} ${context}`;
  if (view.drawn === drawn) return;
  view.drawn = drawn;
  view.finished(turn, {
    context,
    regenerate: isLast ? () => regenerate(number) : null,
    goOn: isLast && turn.text && ["cut", "stopped", "length"].includes(turn.end) ? () => goOn(turn, number) : null,
    compare: isWhole && turn.counts?.tokens ? (num) => compare(turn, number, num) : null,
  });
}

/** Write to the store what has changed. isMore: more is about to come, so that the lists of all tabs can wait. */
function keep(isMore = false, kept = conversation) {
  keeping = keeping.then(() => keepNow(kept, isMore));
  return keeping;
}

async function keepNow(kept, isMore) {
  if (!store || kept.isRemoved) return;
  let outcome = await store.save(kept);
  if (outcome === "elsewhere") {
    kept.detach();
    outcome = await store.save(kept);
    notify("This conversation was changed or deleted in another tab. This tab goes on with a copy of its own.");
  }
  kept.isUnkept = outcome !== "kept";
  if (outcome === "full") notify("The storage for conversations is full, so this one is not kept. Delete others, or export this one.");
  if (outcome === "failed") notify(NO_ANSWER);
  if (kept === conversation) remember(OPEN, kept.id);
  if (isMore) return;
  store.announce(kept.id);
  list.show(conversation.id);
}

/** Go on with another conversation. */
function show(next) {
  const before = conversation;
  conversation = next;
  remember(OPEN, next.id);
  notify("");
  if (before.turns.length && !before.run && (!store || before.isUnkept)) notify("The conversation before this one is not kept.", () => show(before));
  byId("turns").replaceChildren();
  showConversation();
  showRun();
  scrollToEnd();
  list?.show(next.id);
  if (byId("list").matches(":popover-open")) byId("list").hidePopover();
  question.focus({ preventScroll: true });
}

/** The conversation of this id that has a request in progress here. */
function aliveOf(id) {
  return [...alive].find((one) => one.id === id);
}

async function open(id) {
  await keeping;
  const found = aliveOf(id) ?? (await store.load(id));
  if (found) show(found);
  else notify("This conversation cannot be read.");
}

/** Delete a conversation that is kept. */
async function remove(head) {
  await keeping;
  const loaded = await store.load(head.id);
  const removed = head.id === conversation.id ? conversation : (aliveOf(head.id) ?? loaded);
  if (removed) removed.isRemoved = true;
  removed?.run?.controller.abort();
  await store.remove(head.id);
  store.announce(head.id);
  if (removed === conversation) show(new Conversation());
  else if (conversation.isUnkept) keep(); // there may be room now
  else list.show();
  const undo = async () => {
    removed.isRemoved = false;
    removed.detach();
    await keep(false, removed);
    if (!conversation.run && (removed.isUnkept || conversation.turns.length === 0)) show(removed);
  };
  notify(`Deleted: ${head.title}`, removed && undo);
}

/** An empty name gives back the beginning of the first question. */
async function rename({ id }, name) {
  await keeping;
  const renamed = id === conversation.id ? conversation : (aliveOf(id) ?? (await store.load(id)));
  if (!renamed) return;
  renamed.name = name;
  await keep(false, renamed);
}

/** Another tab has changed or deleted a conversation. */
async function look(id) {
  list.show();
  if (id !== conversation.id || conversation.run) return;
  await keeping;
  const found = await store.load(id);
  if (conversation.run || id !== conversation.id || found?.version === conversation.version) return;
  if (found) show(found);
  else {
    conversation.detach();
    notify("This conversation was deleted in another tab. It is kept again when you go on with it.");
  }
}

function send(text, urls = []) {
  notify("");
  conversation.add(userTurn(text, urls));
  return answer();
}

/** A turn of the user. */
function userTurn(text, urls) {
  return { role: "user", text, ...(urls?.length ? { images: urls } : {}) };
}

function edit(number, text, urls) {
  if (conversation.run) return null;
  const hasMore = conversation.turns.length > number + 2;
  const undo = cut(number);
  conversation.add(userTurn(text, urls));
  notify(hasMore ? "The turns behind the edited message were removed." : "The message was edited.", undo);
  return answer();
}

/** Take away turns; returns the function that brings them back. */
function cut(number) {
  const restore = conversation.cut(number);
  return () => {
    restore();
    showConversation();
    keep();
  };
}

async function regenerate(number) {
  if (conversation.run) return;
  const own = conversation;
  const before = conversation.turns[number];
  const undo = cut(number);
  notify("");
  const turn = await answer();
  if (own !== conversation) return;
  if (turn.end === "stop" && turn.text === before.text && turn.thought === before.thought) {
    notify("The same answer came again. Above temperature 0 each answer is drawn anew.", undo);
  } else if (isUseful(before)) notify("The earlier answer was replaced.", undo);
}

function isUseful(turn) {
  return Boolean(turn.text || turn.thought);
}

/** Ask for the answer to the last message. */
async function answer() {
  const own = conversation;
  const number = own.turns.length;
  const model = server.model?.id;
  const seed = crypto.getRandomValues(new Uint32Array(1))[0];
  const asked = { ...(model ? { model } : {}), ...settings.fields(seed), ...systemOf() };
  const turn = own.add({
    role: "assistant", model: model ?? UNKNOWN, asked, text: "", thought: "", marks: [], thoughtMarks: [], notices: [], end: "cut", counts: null,
  });
  return grown(own, turn, requestOf(own, asked, number));
}

/** Run the request of a turn that grows by what comes. Whoever looks at another conversation meanwhile is not disturbed. */
async function grown(own, turn, body) {
  const run = begin(own, turn);
  keep();
  const view = views.get(turn);
  view.running("Waiting for the server.");
  scrollToEnd();
  say("The model answers.");
  await follow(own, body, view, run);
  finish(own);
  if (own === conversation) {
    speak(run, view.text(turn, false), true);
    say(endOf(turn, server.contextOf(turn.model)) || "The answer is complete.");
  } else if (!own.isRemoved) say(`The answer is complete: ${own.title}`);
  return turn;
}

/** Continue an answer that was cut: the model reads it as its own beginning. */
function goOn(turn, number) {
  if (conversation.run) return;
  notify("");
  const body = requestOf(conversation, turn.asked, number);
  body.messages.push(messageOf(turn));
  grown(conversation, turn, { ...body, continue_final_message: true, add_generation_prompt: false });
}

function systemOf() {
  return settings.values.system.trim() ? { system: settings.values.system } : {};
}

/** The body of a request. asked: its fields, the system prompt among them. number: of the turn that is to be answered. */
function requestOf(own, asked, number) {
  const { system, ...fields } = asked;
  return {
    ...fields,
    messages: own.messages(number, system),
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
    timings_per_token: true,
    return_drafted: true,
  };
}

/** Read a streamed answer into a turn, behind what it has, and show it as it comes. Raises nothing: what went wrong stands in the turn. */
async function follow(own, body, view, run) {
  const { turn } = run;
  const { signal } = run.controller;
  const received = new Received();
  const begun = wordsOf(turn);
  const words = () => joined(begun, wordsOf(received));
  let drawn = 0;
  let saved = performance.now();
  const draw = () => {
    drawn = 0;
    const isShown = own === conversation;
    const isAtEnd = isShown && atEnd();
    const blocks = view.text(words(), true);
    view.running(stateOf(received));
    if (isShown) speak(run, blocks);
    if (isAtEnd) scrollToEnd();
  };
  try {
    for await (const chunk of api.chat(body, signal)) {
      received.take(chunk);
      Object.assign(turn, words());
      drawn ||= requestAnimationFrame(draw);
      if (performance.now() - saved > SAVE_MS) {
        own.touch(turn);
        keep(true, own);
        saved = performance.now();
      }
    }
    if (received.reason === "length" && !server.contextOf(turn.model)) await server.refresh();
    const isAtContext = received.reason === "length" && isFull(countsOf(received), server.contextOf(turn.model));
    turn.end = isAtContext ? "context" : (received.reason ?? "stop");
  } catch (error) {
    turn.end = signal.aborted ? "stopped" : isLeaving ? "cut" : "failed"; // a page that is left loses its connections
    if (turn.end === "failed") blame(turn, error);
  }
  cancelAnimationFrame(drawn);
  Object.assign(turn, words(), { counts: received.timings ? countsOf(received) : null, notices: [...received.notices, ...received.receipts.map(proofOf)] });
  own.touch(turn);
}

/** Words of an answer, and those that continue it. */
function joined(begun, more) {
  const behind = (marks, by) => marks.map(([from, to]) => [from + by, to + by]);
  return {
    text: begun.text + more.text,
    thought: begun.thought + more.thought,
    marks: [...begun.marks, ...behind(more.marks, begun.text.length)],
    thoughtMarks: [...begun.thoughtMarks, ...behind(more.thoughtMarks, begun.thought.length)],
  };
}

function wordsOf({ text, thought, marks, thoughtMarks }) {
  return { text, thought, marks, thoughtMarks };
}

/** Put into a turn why it failed, and look after the server. */
function blame(turn, error) {
  turn.error = error.message;
  if (error instanceof GoneError) server.untilItAnswers();
  else if (!(error instanceof ApiError)) {
    turn.error = `This page made a mistake: ${error.message}`;
    console.error(error);
  } else if (error.status === 401) server.askForKey("The server does not accept this key.");
  else if (error.code === "context_length_exceeded") turn.error += " Start a new conversation, or edit an earlier message.";
}

function stateOf({ text, thought, progress, timings }) {
  if (timings) return sizeOf(countsOf({ timings }));
  if (progress && !text && !thought) return `Reading the prompt: ${progress.processed} of ${count(progress.total, "token")}.`;
  return "Waiting for the first token.";
}

/** Announce blocks that are complete. */
function speak(run, blocks, isWhole = false) {
  for (; run.spoken < blocks.length - (isWhole ? 0 : 1); run.spoken += 1) say(blocks[run.spoken]);
}

/**
 * Repeat the request of an answer with drafting and without, in turns, and say what differs. num: of runs each. The answer's own run does
 * not count: it may have been the first of the server. Nothing is drafted from earlier answers, which now hold this very text.
 */
async function compare(turn, number, num) {
  if (conversation.run) return;
  const own = conversation;
  const { draft, prove: _, ...fields } = turn.asked;
  const drafters = draft && draft !== "off" ? draft : server.draftersOf(turn.model).filter((name) => name !== "suffix").join(",");
  const [drafting, plainly] = [{ ...fields, ...(drafters ? { draft: drafters } : {}) }, { ...fields, draft: "off" }];
  const view = views.get(turn);
  const speeds = turn.comparison?.isTimed ? turn.comparison.speeds : [];
  const { signal } = begin(own, turn).controller;
  const run = async (asked) => {
    const how = `The same request runs ${asked.draft === "off" ? "without" : "with"} drafting`;
    view.running(`${how}.`);
    if (own === conversation) {
      say(`${how}.`);
      keepFocus();
    }
    const received = new Received();
    for await (const chunk of api.chat(requestOf(own, asked, number), signal)) {
      received.take(chunk);
      if (received.timings) view.running(`${how}: ${sizeOf(countsOf(received))}`);
    }
    return { ...wordsOf(received), counts: countsOf(received) };
  };
  try {
    for (let i = 0; i < num; i += 1) {
      const first = await run(i % 2 ? plainly : drafting);
      const second = await run(i % 2 ? drafting : plainly);
      const [drafted, plain] = i % 2 ? [second, first] : [first, second];
      speeds.push([drafted.counts.speed, plain.counts.speed]);
      const other = [drafted, plain].find(({ text, thought }) => text !== turn.text || thought !== turn.thought);
      turn.comparison = { ...compared(other ? turn : drafted, other ?? plain, speeds), other: other?.text ?? "", speeds };
      if (!turn.comparison.isTimed) break;
    }
    say(turn.comparison.sentence);
  } catch (error) {
    const failed = { error: "" };
    if (!signal.aborted) blame(failed, error);
    const sentence = failed.error ? `The comparison failed: ${failed.error}` : "You stopped the comparison.";
    turn.comparison = { same: true, isTimed: false, sentence, other: "", speeds: [] };
  }
  own.touch(turn);
  finish(own);
}

// ---- while a request runs

/** turn: the answer that the request is about. Returns the run. */
function begin(own, turn) {
  own.run = { controller: new AbortController(), turn, spoken: 0 };
  alive.add(own);
  showConversation();
  views.get(turn).drawn = null;
  showRun();
  return own.run;
}

/** Focus does not get lost with a button that was pressed and is gone. */
function keepFocus() {
  if (!document.activeElement || document.activeElement === document.body) byId("stop").focus();
}

/** A request has ended. */
function finish(own) {
  own.run = null;
  alive.delete(own);
  keep(false, own);
  if (own === conversation) {
    const wasAtEnd = atEnd();
    showRun();
    showConversation();
    if (wasAtEnd) scrollToEnd();
  }
  if (!server.model?.meta.loaded) server.refresh();
}

function stop() {
  conversation.run?.controller.abort();
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
  if (conversation.run || attached.isReading || !(text.trim() || attached.urls.length)) return;
  question.value = "";
  grow();
  send(text, attached.take());
  question.focus({ preventScroll: true });
});

question.addEventListener("keydown", (event) => {
  if (isSend(event)) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
question.addEventListener("input", grow);

const attached = new Attachments(question, { sees: () => server.sees, notify, oninsert: grow });

/** The text of the field has changed. The field is as high as its text where the browser does not do that by itself. */
function grow() {
  remember(TYPED, question.value);
  if (CSS.supports("field-sizing", "content")) return;
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

const SHORTCUTS = {
  k: () => {
    if (!store) return;
    if (!byId("list").checkVisibility()) byId("list").showPopover();
    byId("search").focus();
  },
  "Shift+o": () => {
    show(new Conversation());
    question.focus();
  },
  ",": () => byId("open-settings").click(),
  "/": () => byId("open-keys").click(),
};

byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && conversation.run && !document.querySelector("dialog[open], :popover-open")) stop();
  const isFree = (event.ctrlKey || event.metaKey) && !document.querySelector("dialog[open]");
  const act = isFree && SHORTCUTS[event.shiftKey ? `Shift+${event.key.toLowerCase()}` : event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

for (const button of document.querySelectorAll(".new")) button.addEventListener("click", () => show(new Conversation()));

byId("export-markdown").addEventListener("click", () => download(asMarkdown(conversation), fileName(conversation.title, "md"), "text/markdown"));
byId("export-json").addEventListener("click", () => download(asJson(conversation), fileName(conversation.title, "json"), "application/json"));
byId("export-all").addEventListener("click", async () => {
  const all = await Promise.all((await store.list()).map(({ id }) => store.load(id)));
  download(`[${all.filter(Boolean).map(asJson).join(",\n")}]`, "conversations.json", "application/json");
});

byId("examples").append(
  ...EXAMPLES.map((text) =>
    element("li", {}, element("button", { type: "button", onclick: () => { if (!conversation.run) send(text); } }, text.replace(/\n[^]*/, " …"))),
  ),
);

// ---- dialogs

function showTint() {
  document.body.classList.toggle("no-tint", !settings.values.colour);
}

byId("open-settings").addEventListener("click", () => openSettings(settings, server.model?.meta));
onSettings(settings, (kept) => {
  showTint();
  notify(kept ? "" : "The browser does not keep these settings: its storage is full or switched off.");
});
byId("open-connect").addEventListener("click", () => openConnect(api));
new Models(api, server);
byId("open-keys").addEventListener("click", () => byId("shortcuts").showModal());

// ---- leaving, start

window.addEventListener("beforeunload", (event) => {
  if ([conversation, ...alive].some(({ isUnkept }) => isUnkept)) event.preventDefault(); // the browser asks whether to leave
  else isLeaving = true;
});
window.addEventListener("pageshow", () => {
  isLeaving = false;
});

/** Take up what the browser keeps: the list, and the conversation that was open in this tab. */
async function takeUp() {
  store = await openStore();
  if (!store) {
    byId("list-state").textContent = KEEPS_NOTHING;
    byId("search").hidden = true;
    byId("export-all").hidden = true;
    notify(KEEPS_NOTHING);
    return;
  }
  const told = (act) => (given) => act(given).catch(() => notify(NO_ANSWER));
  list = new List(store, { open: told(open), rename: (head, name) => rename(head, name).catch(() => notify(NO_ANSWER)), remove: told(remove) });
  store.onchange = told(look);
  const found = await store.load(session?.getItem(OPEN) ?? "");
  if (found && conversation.turns.length === 0) show(found);
  else await list.show(conversation.id);
}

question.value = session?.getItem(TYPED) ?? "";
grow();
showTint();
showConversation();
question.focus({ preventScroll: true });
takeUp();
server.connect();
