// Sentences about answers. Knows no DOM.

const NUMBER = new Intl.NumberFormat("en-US");

export function count(number, noun) {
  return `${NUMBER.format(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** Bytes as people write them: 8.8 MB, 19.3 GB. */
export function amount(bytes) {
  const power = bytes < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(bytes) / 3));
  return `${power ? Number((bytes / 1000 ** power).toPrecision(3)) : bytes} ${["bytes", "kB", "MB", "GB", "TB"][power]}`;
}

export function speed(perSecond) {
  return `${perSecond >= 100 ? NUMBER.format(Math.round(perSecond)) : perSecond.toFixed(1)} tokens/s`;
}

/** Numbers of an answer, from the server's timings and usage. */
export function countsOf({ timings, usage, drafting }) {
  return {
    tokens: usage?.completion_tokens ?? timings?.predicted_n ?? 0,
    // of one token nothing was timed but the prompt
    speed: timings && timings.predicted_n > 1 ? timings.predicted_per_second : 0,
    drafted: timings?.draft_n ?? 0,
    accepted: timings?.draft_n_accepted ?? 0,
    prompt: usage?.prompt_tokens ?? 0,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? 0,
    rounds: drafting?.rounds ?? 0,
    draftedRounds: drafting?.drafted_rounds ?? 0,
    exact: Boolean(drafting?.bit_exact), // whether each round had the bits of plain steps; true of an answer that was proved otherwise
    exactWidth: drafting?.exact_width ?? 0, // tokens up to which a round has them
  };
}

/** "56 tokens · 83.1 tokens/s" */
export function sizeOf(counts) {
  const parts = [count(counts.tokens, "token")];
  if (counts.speed > 0) parts.push(speed(counts.speed));
  return parts.join(" · ");
}

/** What a receipt of the server says. */
export function proofOf({ equal, num_tokens: tokens, difference }) {
  if (equal) return `Proved: decoding without drafts gives the same ${count(tokens, "token")}.`;
  return `Not proved: decoding without drafts gives another text from token ${NUMBER.format(difference.place + 1)} on.`;
}

/** "41 of 45 drafted tokens accepted (91 %)", or that nothing was drafted. */
export function draftingOf(counts, asked) {
  if (asked?.draft === "off") return "without drafting";
  if (!counts.drafted) return "nothing was drafted";
  const share = Math.round((100 * counts.accepted) / counts.drafted);
  return `${NUMBER.format(counts.accepted)} of ${count(counts.drafted, "drafted token")} accepted (${share} %)`;
}

/** What is known of a drafted answer's text: it is that of plain decoding; "" where nothing is. */
export function samenessOf(counts) {
  if (!counts.drafted) return "";
  if (counts.exact) return "same text, proved";
  return counts.exactWidth > 1 ? `same bits in rounds to ${counts.exactWidth} tokens` : "";
}

/** Whether an answer's text reached the end of the context of so many tokens. */
export function isFull(counts, context) {
  return Boolean(context) && counts.prompt + counts.tokens >= context;
}

/** Why an answer has ended, where that is not the model's own end; "" else. */
export function endOf(turn, context) {
  switch (turn.end) {
    case "context":
      return `The answer ends here because the context${context ? ` of ${count(context, "token")}` : ""} is full. For the next message its first turns are no longer shown to the model.`;
    case "length":
      if (turn.asked?.max_tokens) return `The answer ends here at the limit of ${count(turn.asked.max_tokens, "token")} that is set in the settings.`;
      return turn.notices?.some((notice) => /memory|looped/.test(notice))
        ? "The answer ends here before its own end."
        : "The answer ends here at the server's limit for the length of an answer. The settings can raise it.";
    case "stopped":
      return "You stopped this answer.";
    case "cut":
      return "This answer has no end yet: its page was left, or it runs in another tab.";
    case "failed":
      return turn.error ?? "The answer failed.";
    case "tool_calls":
      return "The model asked for a tool, and this page has none.";
    default:
      return isEmpty(turn) ? "The model's answer is empty." : "";
  }
}

function isEmpty(turn) {
  return !turn.text && !turn.thought;
}

/** "312 of 2,048 tokens of context used" after an answer; "" where that is not known. */
export function contextOf(counts, context) {
  if (!counts?.prompt || !context) return "";
  const used = Math.min(counts.prompt + counts.tokens, context);
  return `${NUMBER.format(used)} of ${count(context, "token")} of context used`;
}

/**
 * Whether an answer and another one to the same request with drafting switched the other way are equal. Returns "" where they are, else a
 * sentence on where they differ.
 */
export function differenceOf(one, other) {
  const at = firstDifference(one.thought + "\n" + one.text, other.thought + "\n" + other.text);
  if (at === null) return "";
  const where = at <= one.thought.length ? "The thinking differs" : "The texts differ";
  const character = at <= one.thought.length ? at + 1 : at - one.thought.length;
  return `${where} from character ${NUMBER.format(character)} on, so no speeds are compared.`;
}

/** What the server's ratio says of two answers with equal texts. */
export function ratioOf({ refusal, words, num_pairs: pairs }) {
  return `The texts are equal. ${refusal ? `No speeds are compared, as ${refusal}.` : `In ${count(pairs, "pair")} of runs it was ${words}.`}`;
}

/** The number of the first character in which two texts differ; null where they are equal. */
export function firstDifference(one, other) {
  if (one === other) return null;
  let i = 0;
  while (i < one.length && one[i] === other[i]) i += 1;
  return i;
}

/** A command that asks the server the same from a terminal. */
export function curl(base, hasKey) {
  const key = hasKey ? ' -H "Authorization: Bearer $MLXSPEC_API_KEY"' : "";
  const body = '{"messages": [{"role": "user", "content": "what does os.path.join do?"}]}';
  return `curl ${base}/chat/completions -H 'Content-Type: application/json'${key} -d '${body}'`;
}

/** The line that makes a client of OpenAI's Python SDK. */
export function sdk(base, hasKey) {
  return `client = openai.OpenAI(base_url="${base}", api_key=${hasKey ? 'os.environ["MLXSPEC_API_KEY"]' : '"none"'})`;
}
