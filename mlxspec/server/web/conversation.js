// The turns of a conversation, kept in the browser's storage. Knows no DOM.
//
// A turn is {role: "user", text} or {role: "assistant", text, ...}. A user's turn may have images: data: URLs. An assistant's turn also has
//   thought, marks, thoughtMarks   see Received in api.js
//   end       how it ended: stop, length, context, tool_calls, stopped (by the user), cut (the page was left), failed
//   error     the sentence that says why, where it failed
//   asked     the request's fields other than messages, so that it can be repeated
//   counts    {tokens, speed, drafted, accepted, prompt, cached}
//   notices   what the server said about the request

const KEY = "mlxspec.conversation";
const VERSION = 1;

export class Conversation {
  turns = [];
  #storage;
  #undone = null;

  /** storage: of the browser, or null. Takes up the conversation that is kept there. */
  constructor(storage) {
    this.#storage = storage;
    this.turns = read(storage) ?? [];
  }

  add(turn) {
    this.turns.push(turn);
    return turn;
  }

  /** Take away the turns from number `first` on. `undo` brings back what was there. */
  cut(first) {
    this.#undone = [...this.turns];
    this.turns = this.turns.slice(0, first);
  }

  /** Forget what `undo` would bring back. */
  settle() {
    this.#undone = null;
  }

  get canUndo() {
    return this.#undone !== null;
  }

  undo() {
    if (this.#undone) this.turns = this.#undone;
    this.#undone = null;
  }

  /** Take up what another tab has stored. */
  reload() {
    this.turns = read(this.#storage) ?? [];
    this.#undone = null;
  }

  /** Whether the browser has kept it. */
  save() {
    try {
      if (this.turns.length) this.#storage.setItem(KEY, JSON.stringify({ version: VERSION, turns: this.turns }));
      else this.#storage.removeItem(KEY);
      return true;
    } catch {
      return false; // no storage, or it is full
    }
  }

  /** What the model reads before turn number `end`. A question without an answer is left out, unless it is the last. */
  messages(end, system) {
    const out = system ? [{ role: "system", content: system }] : [];
    const turns = this.turns.slice(0, end);
    turns.forEach((turn, i) => {
      if (turn.role === "user") {
        const next = turns[i + 1];
        if (!next || isAnswer(next)) out.push({ role: "user", content: contentOf(turn) });
      } else if (isAnswer(turn)) {
        out.push({ role: "assistant", content: turn.text, ...(turn.thought ? { reasoning_content: turn.thought } : {}) });
      }
    });
    return out;
  }
}

export const STORAGE_KEY = KEY;

/** Of a user's turn: its text, or parts where it has images. */
function contentOf({ text, images }) {
  if (!images?.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

/** Whether an assistant's turn says something that the model can read again. */
export function isAnswer(turn) {
  return turn.role === "assistant" && Boolean(turn.text || turn.thought);
}

function read(storage) {
  try {
    const found = JSON.parse(storage.getItem(KEY));
    return found?.version === VERSION && Array.isArray(found.turns) && areTurns(found.turns) ? found.turns : null;
  } catch {
    return null;
  }
}

/** Questions and answers in turn. What is stored may come from another version, or from another page of this address. */
function areTurns(turns) {
  return turns.every((turn, i) => {
    if (typeof turn?.text !== "string" || turn.role !== (i % 2 ? "assistant" : "user")) return false;
    if (turn.role === "user") return turn.images === undefined || (Array.isArray(turn.images) && turn.images.every(isImage));
    const lists = [turn.marks, turn.thoughtMarks, turn.notices].every(Array.isArray);
    return lists && typeof turn.thought === "string" && typeof turn.end === "string" && typeof turn.asked === "object";
  });
}

function isImage(url) {
  return typeof url === "string" && url.startsWith("data:image/");
}
