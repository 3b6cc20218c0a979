// The page's events: what its fields, buttons and keys do.

import { send, stop } from "./answers.js";
import { Attachments } from "./attachments.js";
import { Conversation } from "./conversation.js";
import { onSettings, openConnect, openSettings } from "./dialogs.js";
import { notify, onModels, question, server, showConversation } from "./drawing.js";
import { asJson, asMarkdown, download, fileName } from "./export.js";
import { show, takeUp } from "./keeping.js";
import { Models } from "./models.js";
import { byId, element } from "./render.js";
import { TYPED, alive, api, remember, remembered, settings, state } from "./state.js";
import { isSend } from "./turn.js";

const TOYS = ["demo", "demo-gemma", "demo-vision", "demo-agent"];
const OF_TOYS = ["what does os.path.join do?", "how do i use itertools.chain?"]; // they know Python's library and no more
const OF_OTHERS = ["What should I see in Lisbon in two days?", "Explain to a child why the sky is blue."];
const EDIT =
  'remove the docstring:\n```python\ndef read_all(paths):\n    """Read the files at paths and return their texts."""\n    texts = []\n    for path in paths:\n        with open(path) as file:\n            texts.append(file.read())\n    return texts\n```';

// ---- fields and buttons

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value;
  if (state.conversation.run || attached.isReading || !(text.trim() || attached.urls.length)) return;
  question.value = "";
  grow();
  send(text, attached.take());
  question.focus({ preventScroll: true });
});

question.addEventListener("keydown", (event) => {
  if (isSend(event)) {
    event.preventDefault();
    byId("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !question.value) {
    const last = state.conversation.turns.findLast(({ role }) => role === "user");
    if (!last?.text) return;
    event.preventDefault();
    question.value = last.text;
    grow();
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
    if (!state.store) return;
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
  if (event.key === "Escape" && state.conversation.run && !document.querySelector("dialog[open], :popover-open")) stop();
  const isFree = (event.ctrlKey || event.metaKey) && !document.querySelector("dialog[open]");
  const act = isFree && SHORTCUTS[event.shiftKey ? `Shift+${event.key.toLowerCase()}` : event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

for (const button of document.querySelectorAll(".new")) button.addEventListener("click", () => show(new Conversation()));

byId("export-markdown").addEventListener("click", () => download(asMarkdown(state.conversation), fileName(state.conversation.title, "md"), "text/markdown"));
byId("export-json").addEventListener("click", () => download(asJson(state.conversation), fileName(state.conversation.title, "json"), "application/json"));
byId("export-all").addEventListener("click", async () => {
  const all = await Promise.all((await state.store.list()).map(({ id }) => state.store.load(id)));
  download(`[${all.filter(Boolean).map(asJson).join(",\n")}]`, "conversations.json", "application/json");
});

/** What the empty page says of the model, and what there is to ask it. */
function showModel() {
  const isToy = TOYS.includes(server.model?.id);
  byId("toy").hidden = !isToy;
  byId("examples").replaceChildren(
    ...[...(isToy ? OF_TOYS : OF_OTHERS), EDIT].map((text) =>
      element("li", {}, element("button", { type: "button", onclick: () => { if (!state.conversation.run) send(text); } }, text.replace(/\n[^]*/, " …"))),
    ),
  );
}

onModels(showModel);
byId("toy-models").addEventListener("click", () => byId("open-models").click());

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
  if ([state.conversation, ...alive].some(({ isUnkept }) => isUnkept)) event.preventDefault(); // the browser asks whether to leave
  else state.isLeaving = true;
});
window.addEventListener("pageshow", () => {
  state.isLeaving = false;
});

question.value = remembered(TYPED);
grow();
showTint();
showModel();
showConversation();
question.focus({ preventScroll: true });
takeUp();
server.connect();
