// The server's routes, as this page uses them. Knows no DOM.

/** An answer of the server that is an error. status: of HTTP; 0 in a stream. */
export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The server cannot be reached, or an answer broke off. */
export class GoneError extends Error {}

export class Api {
  /** base: where the routes are, with a slash at the end. key: the API key, "" where none is needed. */
  constructor(base, key = "") {
    this.base = base;
    this.key = key;
  }

  async models() {
    return (await this.#get("v1/models")).data;
  }

  /** {status, model}: whether the server answers. Needs no key. */
  async health() {
    return this.#get("health");
  }

  /** The models of the server's machine. Raises ApiError where the server does not tell them. */
  async library() {
    return this.#get("api/library");
  }

  async changeLibrary(change) {
    await this.#post("api/library", change);
  }

  /** How far a download is, until it has ended: {status, completed, total}, at last {status: "success", notices}. */
  async *pull(model, signal) {
    const response = await this.#post("api/pull", { model }, signal);
    for await (const line of pieces(response.body, "\n", signal)) {
      const told = JSON.parse(line);
      if (told.error) throw new ApiError(told.error);
      yield told;
    }
  }

  /** How many tokens the prompt of a conversation has; Infinity where that is more than the context. */
  async count({ model, messages }) {
    try {
      const body = { ...(model ? { model } : {}), messages };
      return (await (await this.#post("v1/chat/completions/input_tokens", body)).json()).input_tokens;
    } catch (error) {
      if (error.code === "context_length_exceeded") return Infinity;
      throw error;
    }
  }

  /** What the server's rule makes of pairs of runs: {median, least, most, num_pairs, is_settled, refusal, words}. */
  async ratio(measured) {
    return (await this.#post("api/ratio", measured)).json();
  }

  /** The objects of a streamed answer. Ends with GoneError where the stream does not reach its end. */
  async *chat(body, signal) {
    const response = await this.#post("v1/chat/completions", body, signal);
    yield* events(response.body, signal);
  }

  async #post(path, body, signal) {
    return this.#fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
  }

  async #get(path) {
    const response = await this.#fetch(path, {});
    return response.json();
  }

  async #fetch(path, options) {
    const headers = { ...options.headers, ...(this.key ? { Authorization: `Bearer ${asLatin1(this.key)}` } : {}) };
    let response;
    try {
      response = await fetch(this.base + path, { cache: "no-store", credentials: "omit", ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new GoneError("The server does not answer.");
    }
    if (!response.ok) throw await failure(response);
    return response;
  }
}

async function failure(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
    if (typeof error === "string") error = { message: error }; // of Ollama's routes
  } catch {
    // the status says enough
  }
  return new ApiError(error.message ?? `The server answered with status ${response.status}.`, response.status, error.code);
}

/** Headers are bytes: a key with other characters is sent as its bytes in UTF-8. */
function asLatin1(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

/** The objects of a stream of server-sent events, until [DONE]. Raises ApiError for an error in the stream. */
export async function* events(stream, signal) {
  for await (const piece of pieces(stream, "\n\n", signal)) {
    if (!piece.startsWith("data: ")) continue; // a comment
    if (piece === "data: [DONE]") return;
    const found = JSON.parse(piece.slice(6));
    if (found.error) throw new ApiError(found.error.message, 0, found.error.code);
    yield found;
  }
  throw new GoneError("The answer broke off: the connection to the server has ended.");
}

/** The parts of a stream of text that `end` closes. */
async function* pieces(stream, end, signal) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (let done = false; !done; ) {
      let value;
      ({ done, value } = await read(reader, signal));
      text += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const whole = text.split(end);
      text = whole.pop();
      yield* whole;
    }
  } finally {
    reader.cancel().catch(() => {}); // the server stops answering when nobody reads
  }
}

async function read(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal?.aborted || error.name === "AbortError") throw error;
    throw new GoneError("The answer broke off: the connection to the server has ended.");
  }
}

/** How many UTF-16 units the first `count` characters of a text have. The server counts characters. */
export function units(text, count) {
  let place = 0;
  for (let i = 0; i < count && place < text.length; i += 1) place += text.codePointAt(place) > 0xffff ? 2 : 1;
  return place;
}

/** Everything that a streamed answer has said so far. */
export class Received {
  text = "";
  thought = "";
  marks = []; // [from, to] of what was drafted, in UTF-16 units of `text`
  thoughtMarks = [];
  reason = null; // why it ended: stop, length, tool_calls
  progress = null; // of the prompt: {processed, total}
  timings = null;
  usage = null;
  notices = [];
  receipts = []; // of proved answers
  drafting = null; // rounds of the answer, and whether it is bit-exact

  take(chunk) {
    this.progress = chunk.prompt_progress ?? this.progress;
    this.timings = chunk.timings ?? this.timings;
    this.usage = chunk.usage ?? this.usage;
    this.notices = chunk.mlxspec?.notices ?? this.notices;
    if (chunk.mlxspec?.rounds !== undefined) this.drafting = chunk.mlxspec;
    this.receipts = chunk.mlxspec?.receipts ?? this.receipts;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.reason = choice.finish_reason ?? this.reason;
    const drafted = chunk.mlxspec?.drafted_chars ?? 0;
    const { content, reasoning_content: thought } = choice.delta;
    if (thought) {
      mark(this.thoughtMarks, this.thought.length, units(thought, drafted));
      this.thought += thought;
    }
    if (content) {
      mark(this.marks, this.text.length, units(content, drafted));
      this.text += content;
    }
  }
}

function mark(marks, from, length) {
  if (length === 0) return;
  const last = marks.at(-1);
  if (last && last[1] === from) last[1] += length;
  else marks.push([from, from + length]);
}
