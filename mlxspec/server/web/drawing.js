// The elements of the page as the state has them: the conversation, what is said beside it, and the buttons while a request runs.

import { byId, element } from "./render.js";
import { Server, UNKNOWN } from "./server.js";
import { api, rememberKey, settings, state } from "./state.js";
import { AnswerTurn, UserTurn } from "./turn.js";
import { contextOf } from "./words.js";

export const question = byId("question");
export const views = new WeakMap(); // of each turn its UserTurn or AnswerTurn
export const server = new Server(api, settings, { notify, onmodels: modelsChanged, onkey: rememberKey });

let actions = {};
let tellModels = () => {};

/** told: called when what is known of the models has changed. */
export function onModels(told) {
  tellModels = told;
}

function modelsChanged() {
  showContext();
  tellModels();
}

/** What the buttons of turns do: {edit, regenerate, goOn, compare}. */
export function onTurns(given) {
  actions = given;
}

/** undo: brings back what the sentence says is gone. */
export function notify(sentence, undo = null) {
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
export function say(sentence) {
  const said = element("p", {}, sentence);
  byId("said").append(said);
  setTimeout(() => said.remove(), 10_000);
}

export function showContext() {
  const last = state.conversation.turns.at(-1);
  byId("context").textContent = contextOf(last?.counts, server.contextOf(last?.model));
  const name = state.conversation.turns.length ? state.conversation.title : (server.model?.id ?? UNKNOWN);
  document.title = `${name} · mlxspec`;
}

/** Elements that are there already stay where they are, and with them selection, focus and what was unfolded. */
export function showConversation() {
  const turns = byId("turns");
  state.conversation.turns.forEach((turn, number) => {
    const { article } = viewOf(turn, number);
    if (turns.children[number] !== article) turns.insertBefore(article, turns.children[number] ?? null);
  });
  while (turns.children.length > state.conversation.turns.length) turns.lastChild.remove();
  const isEmpty = state.conversation.turns.length === 0;
  byId("empty").hidden = !isEmpty;
  for (const id of ["export-markdown", "export-json"]) byId(id).disabled = isEmpty;
  for (const button of document.querySelectorAll(".new")) button.disabled = isEmpty;
  showContext();
}

/** The buttons as they are while a request of this conversation runs, or none. Focus does not get lost with one that is gone. */
export function showRun() {
  const isRunning = Boolean(state.conversation.run);
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
    view = turn.role === "user" ? new UserTurn(turn, number, (text) => actions.edit(number, text, turn.images)) : new AnswerTurn(number, turn.model ?? UNKNOWN);
    views.set(turn, view);
  }
  if (turn.role === "assistant" && turn !== state.conversation.run?.turn) showFinished(view, turn, number);
  return view;
}

function showFinished(view, turn, number) {
  const isLast = number === state.conversation.turns.length - 1;
  const isWhole = ["stop", "length", "context"].includes(turn.end);
  const context = server.contextOf(turn.model);
  const drawn = `${isLast} ${context}`;
  if (view.drawn === drawn) return;
  view.drawn = drawn;
  view.finished(turn, {
    context,
    regenerate: isLast ? () => actions.regenerate(number) : null,
    goOn: isLast && turn.text && ["cut", "stopped", "length", "failed"].includes(turn.end) ? () => actions.goOn(turn, number) : null,
    compare: isWhole && turn.counts?.tokens ? (num) => actions.compare(turn, number, num) : null,
  });
}

/** Announce blocks that are complete. */
export function speak(run, blocks, isWhole = false) {
  for (; run.spoken < blocks.length - (isWhole ? 0 : 1); run.spoken += 1) say(blocks[run.spoken]);
}

/** Focus does not get lost with a button that was pressed and is gone. */
export function keepFocus() {
  if (!document.activeElement || document.activeElement === document.body) byId("stop").focus();
}

export function atEnd() {
  const { scrollHeight, clientHeight, scrollTop } = document.scrollingElement;
  return scrollHeight - clientHeight - scrollTop < 80;
}

export function scrollToEnd() {
  document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight;
}
