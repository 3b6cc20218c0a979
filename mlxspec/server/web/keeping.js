// The conversations that the browser keeps: writing, opening, deleting and renaming them, and what other tabs do to them.

import { Conversation } from "./conversation.js";
import { notify, question, scrollToEnd, showConversation, showRun } from "./drawing.js";
import { List } from "./list.js";
import { byId } from "./render.js";
import { OPEN, alive, aliveOf, remember, remembered, state } from "./state.js";
import { openStore } from "./store.js";

const NO_ANSWER = "The browser's storage does not answer. Export this conversation and load the page again.";
const KEEPS_NOTHING = "This browser keeps nothing here, so conversations are gone when the page is left.";

let list = null;
let keeping = Promise.resolve(); // one write at a time

/** Write to the store what has changed. isMore: more is about to come, so that the lists of all tabs can wait. */
export function keep(isMore = false, kept = state.conversation) {
  keeping = keeping.then(() => keepNow(kept, isMore));
  return keeping;
}

async function keepNow(kept, isMore) {
  if (!state.store || kept.isRemoved) return;
  let outcome = await state.store.save(kept);
  if (outcome === "elsewhere") {
    kept.detach();
    outcome = await state.store.save(kept);
    notify("This conversation was changed or deleted in another tab. This tab goes on with a copy of its own.");
  }
  kept.isUnkept = outcome !== "kept";
  if (outcome === "full") notify("The storage for conversations is full, so this one is not kept. Delete others, or export this one.");
  if (outcome === "failed") notify(NO_ANSWER);
  if (kept === state.conversation) {
    remember(OPEN, kept.id);
    showAddress(kept, true);
  }
  if (isMore) return;
  state.store.announce(kept.id);
  list.show(state.conversation.id);
}

/** Go on with another conversation. */
export function show(next) {
  const before = state.conversation;
  state.conversation = next;
  remember(OPEN, next.id);
  showAddress(next);
  notify("");
  if (before.turns.length && !before.run && (!state.store || before.isUnkept)) notify("The conversation before this one is not kept.", () => show(before));
  byId("turns").replaceChildren();
  showConversation();
  showRun();
  scrollToEnd();
  list?.show(next.id);
  if (byId("list").matches(":popover-open")) byId("list").hidePopover();
  question.focus({ preventScroll: true });
}

/** Give a conversation that is kept its address, #c=ID, so that it can be marked, and gone back to. isSame: it is on the screen already. */
function showAddress(own, isSame = false) {
  const hash = own.version ? `#c=${own.id}` : "";
  if (location.hash === hash) return;
  history[isSame ? "replaceState" : "pushState"](null, "", hash || location.pathname + location.search);
}

/** The id in the page's address, "" where there is none. */
function addressed() {
  return /^#c=(\w+)$/.exec(location.hash)?.[1] ?? "";
}

async function open(id) {
  await keeping;
  const found = aliveOf(id) ?? (await state.store.load(id));
  if (found) show(found);
  else notify("This conversation cannot be read.");
}

/** Delete a conversation that is kept. */
async function remove(head) {
  await keeping;
  const loaded = await state.store.load(head.id);
  const removed = head.id === state.conversation.id ? state.conversation : (aliveOf(head.id) ?? loaded);
  if (removed) removed.isRemoved = true;
  removed?.run?.controller.abort();
  await state.store.remove(head.id);
  state.store.announce(head.id);
  if (removed === state.conversation) show(new Conversation());
  else if (state.conversation.isUnkept) keep(); // there may be room now
  else list.show();
  const undo = async () => {
    removed.isRemoved = false;
    removed.detach();
    await keep(false, removed);
    if (!state.conversation.run && (removed.isUnkept || state.conversation.turns.length === 0)) show(removed);
  };
  notify(`Deleted: ${head.title}`, removed && undo);
}

/** An empty name gives back the beginning of the first question. */
async function rename({ id }, name) {
  await keeping;
  const renamed = id === state.conversation.id ? state.conversation : (aliveOf(id) ?? (await state.store.load(id)));
  if (!renamed) return;
  renamed.name = name;
  await keep(false, renamed);
}

/** Another tab has changed or deleted a conversation. */
async function look(id) {
  list.show();
  if (id !== state.conversation.id || state.conversation.run) return;
  await keeping;
  const found = await state.store.load(id);
  if (state.conversation.run || id !== state.conversation.id || found?.version === state.conversation.version) return;
  if (found) show(found);
  else {
    state.conversation.detach();
    notify("This conversation was deleted in another tab. It is kept again when you go on with it.");
  }
}

/** Take up what the browser keeps: the list, and the conversation that was open in this tab. */
export async function takeUp() {
  state.store = await openStore();
  if (!state.store) {
    byId("list-state").textContent = KEEPS_NOTHING;
    byId("search").hidden = true;
    byId("export-all").hidden = true;
    notify(KEEPS_NOTHING);
    return;
  }
  const told = (act) => (given) => act(given).catch(() => notify(NO_ANSWER));
  list = new List(state.store, { open: told(open), rename: (head, name) => rename(head, name).catch(() => notify(NO_ANSWER)), remove: told(remove) });
  state.store.onchange = told(look);
  const follow = told(async () => {
    const id = addressed();
    if (id === state.conversation.id || (!id && !state.conversation.turns.length)) return;
    await (id ? open(id) : show(new Conversation()));
  });
  window.addEventListener("popstate", follow);
  const found = await state.store.load(addressed() || remembered(OPEN));
  if (addressed() && !found) notify("The conversation of this address is not kept in this browser.");
  if (found && state.conversation.turns.length === 0) show(found);
  else await list.show(state.conversation.id);
}
