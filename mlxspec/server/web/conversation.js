// The turns of a conversation. Knows no DOM; store.js keeps it.
//
// A turn is {role: "user", text} or {role: "assistant", text, ...}. A user's turn may have images: data: URLs. An assistant's turn also has
//   thought, marks, thoughtMarks   see Received in api.js
//   end       how it ended: stop, length, context, tool_calls, stopped (by the user), cut (the page was left), failed
//   error     the sentence that says why, where it failed
//   asked     the request's fields other than messages, so that it can be repeated
//   counts    {tokens, speed, drafted, accepted, prompt, cached}
//   notices   what the server said about the request
//   forgotten how many turns at the beginning the model was not shown, as the context was full; absent where it was shown all

const TITLE_CHARACTERS = 80;

export class Conversation {
  changed = new Set(); // turns that are not kept as they are now

  /** version: how often it was kept, 0 for never. time: of its last change, in milliseconds. name: that the user gave it. */
  constructor({ id = newId(), version = 0, time = Date.now(), name = "", turns = [] } = {}) {
    Object.assign(this, { id, version, time, name, turns });
  }

  /** The name that it was given, or the beginning of the first question. */
  get title() {
    if (this.name) return this.name;
    const text = this.turns[0]?.text.trim().replace(/\s+/g, " ") || "Image";
    return text.length > TITLE_CHARACTERS ? `${text.slice(0, TITLE_CHARACTERS - 1)}…` : text;
  }

  add(turn) {
    this.turns.push(turn);
    this.touch(turn);
    return turn;
  }

  /** A turn has changed and is to be kept. */
  touch(turn) {
    this.changed.add(turn);
    this.time = Date.now();
  }

  /** Take away the turns from number `first` on. Returns the function that brings back all that was there. */
  cut(first) {
    const before = this.turns;
    this.turns = before.slice(0, first);
    return () => {
      this.turns = before;
      this.changed = new Set(before);
    };
  }

  /** Make it a conversation of its own, of which nothing is kept. */
  detach() {
    this.id = newId();
    this.version = 0;
    this.changed = new Set(this.turns);
  }

  /** How many turns at the beginning the model was not shown for the last answer. */
  get forgotten() {
    return this.turns.findLast(({ role }) => role === "assistant")?.forgotten ?? 0;
  }

  /** What the model reads from turn number `begin` on, and before turn number `end`. A question without an answer is left out, unless it is the last. */
  messages(begin, end, system) {
    const out = system ? [{ role: "system", content: system }] : [];
    const turns = this.turns.slice(begin, end);
    turns.forEach((turn, i) => {
      if (turn.role === "user") {
        const next = turns[i + 1];
        if (!next || isAnswer(next)) out.push({ role: "user", content: contentOf(turn) });
      } else if (isAnswer(turn)) {
        out.push(messageOf(turn));
      }
    });
    return out;
  }
}

/** Pages of other machines have no crypto.randomUUID without TLS. */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Of a user's turn: its text, or parts where it has images. */
function contentOf({ text, images }) {
  if (!images?.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

/** An answer as the model reads it again. */
export function messageOf({ text, thought }) {
  return { role: "assistant", content: text, ...(thought ? { reasoning_content: thought } : {}) };
}

/** Whether an assistant's turn says something that the model can read again. */
export function isAnswer(turn) {
  return turn.role === "assistant" && Boolean(turn.text || turn.thought);
}

/** Questions and answers in turn. What is stored may come from another version, or from another page of this address. */
export function areTurns(turns) {
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
