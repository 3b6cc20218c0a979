// The elements of one turn of the conversation.

import { picture } from "./attachments.js";
import { Markdown, copyButton, element, texts } from "./render.js";
import { draftingOf, endOf, samenessOf, sizeOf } from "./words.js";

const FENCE = /^ {0,3}(```|~~~)/m; // a message with code is shown as the model's answers are, any other as it was typed
const RUNS = 3; // of each way: fewer say nothing of their spread

function button(text, onclick, more = {}) {
  return element("button", { type: "button", class: "small", onclick, ...more }, text);
}

/** A message of the user. */
export class UserTurn {
  /** edit(text): called with the changed message. */
  constructor(turn, number, edit) {
    const title = `question-${number}`;
    const heading = element("h2", { id: title }, "You");
    const images = (turn.images ?? []).map(picture);
    const text = element("div", { class: "text" }, ...images);
    if (FENCE.test(turn.text)) new Markdown(text.appendChild(element("div", { class: "answer" }))).show(turn.text, []);
    else text.append(turn.text);
    const close = () => {
      this.article.replaceChildren(heading, text, tools);
      change.focus();
    };
    const open = () => this.article.replaceChildren(heading, editor(turn, close, edit));
    const change = button("Edit", open, { class: "small idle", "aria-label": `Edit message ${number / 2 + 1}` });
    const tools = element("div", { class: "tools" }, change, copyButton(() => turn.text, "Copy message"));
    this.article = element("article", { class: "turn user", "aria-labelledby": title }, heading, text, tools);
  }
}

/** Images stay with the message; its text is edited. */
function editor(turn, cancel, edit) {
  const area = element("textarea", { rows: "3", "aria-label": "Edit your message" });
  area.value = turn.text;
  const send = () => {
    if (area.value.trim() || turn.images?.length) edit(area.value);
  };
  const form = element(
    "form",
    { class: "edit" },
    area,
    element("div", { class: "tools" }, element("button", { type: "submit", class: "small main" }, "Send again"), button("Cancel", cancel)),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    } else if (isSend(event)) {
      event.preventDefault();
      send();
    }
  });
  queueMicrotask(() => area.focus());
  return form;
}

/** Whether a key sends a message: Enter alone, and not while a character is being composed. */
export function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.altKey && !event.isComposing;
}

/** An answer, shown as it grows. */
export class AnswerTurn {
  #markdown;
  #source = null; // the text that is shown: of 500 turns only the one that changes is parsed again
  #blocks = [];
  #body = element("div", { class: "answer" });
  #thought = element("div", { class: "thought" });
  #thinking;
  #foot = element("div", { class: "foot-of-turn" });

  /** name: the model's. */
  constructor(number, name) {
    const title = `answer-${number}`;
    this.#markdown = new Markdown(this.#body);
    this.#thinking = element("details", { hidden: true }, element("summary", {}, "Thinking"), this.#thought);
    this.article = element(
      "article",
      { class: "turn assistant", "aria-labelledby": title },
      element("h2", { id: title }, name),
      this.#thinking,
      this.#body,
      this.#foot,
    );
  }

  /** The text so far; returns the plain text of its blocks. */
  text(received, isRunning) {
    this.article.setAttribute("aria-busy", String(isRunning));
    this.#thinking.hidden = !received.thought;
    if (received.thought && this.#thought.textContent !== received.thought) {
      this.#thought.replaceChildren(...texts(received.thought, 0, received.thoughtMarks));
    }
    if (received.text !== this.#source) {
      this.#source = received.text;
      this.#blocks = this.#markdown.show(received.text, received.marks);
    }
    return this.#blocks;
  }

  /** What is going on while the answer runs. */
  running(sentence) {
    this.#foot.replaceChildren(element("p", { class: "counts" }, sentence));
  }

  /** A finished turn. actions: {context, regenerate, goOn, compare}, functions or null where they make no sense. */
  finished(turn, { context, regenerate, goOn, compare }) {
    this.text(turn, false);
    const parts = [];
    const sentence = endOf(turn, context);
    if (sentence) parts.push(element("p", { class: "end" }, sentence));
    parts.push(element("div", { class: "tools" }, ...this.#tools(turn, regenerate, goOn, compare)));
    if (turn.notices.length) parts.push(notices(turn.notices));
    if (turn.comparison) parts.push(comparison(turn.comparison, compare));
    this.#foot.replaceChildren(...parts);
  }

  #tools(turn, regenerate, goOn, compare) {
    const tools = [];
    if (turn.counts?.tokens) {
      const drafting = draftingOf(turn.counts, turn.asked);
      const legend = turn.counts.accepted ? element("span", { class: "drafted" }, drafting) : drafting;
      const sameness = samenessOf(turn.counts);
      tools.push(element("span", { class: "counts" }, `${sizeOf(turn.counts)} · `, legend, sameness && ` · ${sameness}`));
    }
    if (turn.text) tools.push(copyButton(() => turn.text, "Copy answer"));
    if (regenerate) tools.push(button(turn.end === "failed" ? "Try again" : "Regenerate", regenerate, { class: "small idle" }));
    if (goOn) tools.push(button("Continue", goOn, { class: "small idle", "aria-label": "Continue this answer" }));
    if (compare && turn.counts.drafted && !turn.counts.exact) tools.push(button("Prove", () => compare(0), { class: "small idle", "aria-label": "Prove this answer" }));
    const other = turn.asked.draft === "off" ? "with" : "without";
    if (compare && !turn.comparison?.isTimed) tools.push(button("Compare", () => compare(RUNS), { class: "small idle", "aria-label": `Compare ${other} drafting` }));
    return tools;
  }
}

function notices(sentences) {
  return element("ul", { class: "notices", "aria-label": "Notices of the server" }, ...sentences.map((s) => element("li", {}, s)));
}

function comparison({ same, isTimed, sentence, other }, compare) {
  const made = element("div", { class: "comparison" }, element("p", {}, sentence));
  if (!same && other) made.append(element("details", {}, element("summary", {}, "The other answer"), element("div", { class: "other" }, other)));
  if (isTimed && compare) made.append(button(`${RUNS} more runs`, () => compare(RUNS), { class: "small idle" }));
  return made;
}
