// Requests and what comes of them: a message that is sent or edited, an answer that grows, is regenerated, continued or compared.

import { ApiError, GoneError, Received } from "./api.js";
import { messageOf } from "./conversation.js";
import { atEnd, keepFocus, notify, onTurns, say, scrollToEnd, server, showConversation, showRun, speak, views } from "./drawing.js";
import { keep } from "./keeping.js";
import { UNKNOWN } from "./server.js";
import { alive, api, requestOf, settings, state, systemOf, userTurn } from "./state.js";
import { count, countsOf, differenceOf, endOf, isFull, proofOf, ratioOf, sizeOf } from "./words.js";

const SAVE_MS = 500;

onTurns({ edit, regenerate, goOn, compare });

export function send(text, urls = []) {
  notify("");
  state.conversation.add(userTurn(text, urls));
  return answer();
}

function edit(number, text, urls) {
  if (state.conversation.run) return null;
  const hasMore = state.conversation.turns.length > number + 2;
  const undo = cut(number);
  state.conversation.add(userTurn(text, urls));
  notify(hasMore ? "The turns behind the edited message were removed." : "The message was edited.", undo);
  return answer();
}

/** Take away turns; returns the function that brings them back. */
function cut(number) {
  const restore = state.conversation.cut(number);
  return () => {
    restore();
    showConversation();
    keep();
  };
}

async function regenerate(number) {
  if (state.conversation.run) return;
  const own = state.conversation;
  const before = state.conversation.turns[number];
  const undo = cut(number);
  notify("");
  const turn = await answer();
  if (own !== state.conversation) return;
  if (turn.end === "stop" && turn.text === before.text && turn.thought === before.thought) {
    notify("The same answer came again. Above temperature 0 each answer is drawn anew.", undo);
  } else if (isUseful(before)) notify("The earlier answer was replaced.", undo);
}

function isUseful(turn) {
  return Boolean(turn.text || turn.thought);
}

/** Ask for the answer to the last message. */
async function answer() {
  const own = state.conversation;
  const number = own.turns.length;
  const model = server.model?.id;
  const seed = crypto.getRandomValues(new Uint32Array(1))[0];
  const asked = { ...(model ? { model } : {}), ...settings.fields(seed), ...systemOf() };
  const before = own.forgotten;
  const turn = own.add({
    role: "assistant", model: model ?? UNKNOWN, asked, text: "", thought: "", marks: [], thoughtMarks: [], notices: [], end: "cut", counts: null,
  });
  return grown(own, turn, () => fitted(own, turn, number, before));
}

/**
 * The body of a request for turn `number`. Where an eighth of the context is not left for the answer, the first turns are not shown to the
 * model until a quarter is, as in `mlxspec chat`; the last question always is. before: turns that the answer before was not shown.
 */
async function fitted(own, turn, number, before) {
  const context = server.contextOf(turn.model);
  const used = own.turns.slice(0, number).findLast(({ counts }) => counts)?.counts;
  const written = own.turns[number - 1];
  const body = () => requestOf(own, turn.asked, number, turn.forgotten);
  turn.forgotten = Math.min(before, number - 1);
  const most = written.text.length + (used ? used.prompt + used.tokens : 0); // a token has a character at least
  if (!context || (most < (7 / 8) * context && !written.images)) return body();
  let room = context / 8;
  while (turn.forgotten + 2 < number && context - (await api.count(body())) < room) {
    turn.forgotten += 2;
    room = context / 4;
  }
  if (turn.forgotten > before) {
    const first = turn.forgotten === 2 ? "The first turn is" : `The first ${turn.forgotten / 2} turns are`;
    turn.notices = [`${first} no longer shown to the model: the context is full.`];
  }
  return body();
}

/** Run the request of a turn that grows by what comes. Whoever looks at another conversation meanwhile is not disturbed. body: makes it. */
async function grown(own, turn, body) {
  const run = begin(own, turn);
  keep();
  const view = views.get(turn);
  view.running("Waiting for the server.");
  keepFocus(); // the button that was pressed is gone now
  scrollToEnd();
  say("The model answers.");
  await follow(own, body, view, run);
  finish(own);
  if (own === state.conversation) {
    speak(run, view.text(turn, false), true);
    say(endOf(turn, server.contextOf(turn.model)) || "The answer is complete.");
  } else if (!own.isRemoved) say(`The answer is complete: ${own.title}`);
  return turn;
}

/** Continue an answer that was cut: the model reads it as its own beginning. */
function goOn(turn, number) {
  if (state.conversation.run) return;
  notify("");
  const body = requestOf(state.conversation, turn.asked, number, turn.forgotten);
  body.messages.push(messageOf(turn));
  grown(state.conversation, turn, () => ({ ...body, continue_final_message: true, add_generation_prompt: false }));
}

/** Read a streamed answer into a turn, behind what it has, and show it as it comes. Raises nothing: what went wrong stands in the turn. */
async function follow(own, body, view, run) {
  const { turn } = run;
  const { signal } = run.controller;
  const received = new Received();
  const begun = wordsOf(turn);
  const wasExact = !(begun.text || begun.thought) || Boolean(turn.counts?.exact);
  const words = () => joined(begun, wordsOf(received));
  let drawn = 0;
  let saved = performance.now();
  const draw = () => {
    drawn = 0;
    const isShown = own === state.conversation;
    const isAtEnd = isShown && atEnd();
    const blocks = view.text(words(), true);
    view.running(stateOf(received));
    if (isShown) speak(run, blocks);
    if (isAtEnd) scrollToEnd();
  };
  try {
    for await (const chunk of api.chat(await body(), signal)) {
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
    turn.end = signal.aborted ? "stopped" : state.isLeaving ? "cut" : "failed"; // a page that is left loses its connections
    if (turn.end === "failed") blame(turn, error);
  }
  cancelAnimationFrame(drawn);
  Object.assign(turn, words(), { counts: received.timings ? countsOf(received) : null, notices: [...new Set([...turn.notices, ...received.notices, ...received.receipts.map(proofOf)])] });
  if (turn.counts) turn.counts.exact &&= wasExact; // of a continued answer both parts are
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
  if (progress && !text && !thought) {
    const { processed, total, cache, time_ms: milliseconds } = progress;
    const speed = (processed - cache) / (milliseconds / 1000);
    const pace = speed > 0 && speed < Infinity ? `, ${speed.toFixed(0)} a second, ${((total - processed) / speed).toFixed(0)} s left` : "";
    return `Reading the prompt: ${processed} of ${count(total, "token")}${pace}.`;
  }
  return "Waiting for the first token.";
}

/**
 * Repeat the request of an answer with drafting and without, in turns, and say what differs. num: of runs each. The answer's own run does
 * not count: it may have been the first of the server. Nothing is drafted from earlier answers, which now hold this very text. With num 0
 * one run without drafting says whether the answer is proved.
 */
async function compare(turn, number, num) {
  if (state.conversation.run) return;
  const own = state.conversation;
  const { draft, prove: _, ...fields } = turn.asked;
  const drafters = draft && draft !== "off" ? draft : server.draftersOf(turn.model).filter((name) => name !== "suffix").join(",");
  const [drafting, plainly] = [{ ...fields, ...(drafters ? { draft: drafters } : {}) }, { ...fields, draft: "off" }];
  const view = views.get(turn);
  const speeds = turn.comparison?.isTimed ? turn.comparison.speeds : [];
  const { signal } = begin(own, turn).controller;
  const run = async (asked) => {
    const how = `The same request runs ${asked.draft === "off" ? "without" : "with"} drafting`;
    view.running(`${how}.`);
    if (own === state.conversation) {
      say(`${how}.`);
      keepFocus();
    }
    const received = new Received();
    for await (const chunk of api.chat(requestOf(own, asked, number, turn.forgotten), signal)) {
      received.take(chunk);
      if (received.timings) view.running(`${how}: ${sizeOf(countsOf(received))}`);
    }
    return { ...wordsOf(received), counts: countsOf(received) };
  };
  try {
    if (!num) {
      const plain = await run(plainly);
      turn.counts.exact = plain.text === turn.text && plain.thought === turn.thought;
      if (!turn.counts.exact) turn.comparison = await compared(plain, turn, plain, []);
      say(turn.comparison?.sentence ?? "Same text, proved.");
    }
    for (let i = 0; i < num; i += 1) {
      const first = await run(i % 2 ? plainly : drafting);
      const second = await run(i % 2 ? drafting : plainly);
      const [drafted, plain] = i % 2 ? [second, first] : [first, second];
      speeds.push([drafted.counts.speed, plain.counts.speed]);
      const other = [drafted, plain].find(({ text, thought }) => text !== turn.text || thought !== turn.thought);
      turn.comparison = await compared(drafted, turn, other, speeds);
      turn.counts.exact = turn.comparison.same;
      say(turn.comparison.sentence);
      if (!turn.comparison.isTimed) break;
    }
  } catch (error) {
    const failed = { error: "" };
    if (!signal.aborted) blame(failed, error);
    const sentence = failed.error ? `The comparison failed: ${failed.error}` : "You stopped the comparison.";
    turn.comparison = { same: true, isTimed: false, sentence, other: "", speeds: [] };
  }
  own.touch(turn);
  finish(own);
}

/** drafted: a run with drafting. other: a run whose words are not the turn's, where there is one. speeds: of each pair of runs. */
async function compared(drafted, turn, other, speeds) {
  if (other) return { same: false, isTimed: false, sentence: differenceOf(turn, other), other: other.text, speeds: [] };
  const { rounds, draftedRounds } = drafted.counts;
  const found = await api.ratio({ drafted: speeds.map(([fast]) => fast), plain: speeds.map(([, slow]) => slow), rounds, drafted_rounds: draftedRounds });
  return { same: true, isTimed: !found.refusal, sentence: ratioOf(found), other: "", speeds };
}

/** turn: the answer that the request is about. Returns the run. */
function begin(own, turn) {
  own.run = { controller: new AbortController(), turn, spoken: 0 };
  alive.add(own);
  showConversation();
  views.get(turn).drawn = null;
  showRun();
  return own.run;
}

/** A request has ended. */
function finish(own) {
  own.run = null;
  alive.delete(own);
  keep(false, own);
  if (own === state.conversation) {
    const wasAtEnd = atEnd();
    showRun();
    showConversation();
    if (wasAtEnd) scrollToEnd();
  }
  if (!server.model?.meta.loaded) server.refresh();
}

export function stop() {
  state.conversation.run?.controller.abort();
}
