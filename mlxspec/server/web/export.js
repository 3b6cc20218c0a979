// A conversation as a file: JSON with all that is known of it, or Markdown to read. Knows no DOM but for the download.

import { isAnswer, messageOf } from "./conversation.js";
import { element } from "./render.js";

/** Of one conversation, in the form that `mlxspec chat --load` reads, and with all that the page knows of its turns. */
export function asJson({ title, time, turns }) {
  const last = turns.findLast(isAnswer);
  const messages = turns.flatMap((turn, i) => (isAnswer(turn) ? [{ role: "user", content: turns[i - 1].text }, messageOf(turn)] : []));
  const told = { model: last?.model ?? "", system: last?.asked.system ?? null, messages };
  return JSON.stringify({ format: "mlxspec-conversation", version: 1, ...told, title, changed: new Date(time).toISOString(), turns }, null, 1);
}

export function asMarkdown({ title, turns }) {
  const parts = [`# ${title}`];
  for (const turn of turns) {
    parts.push(`## ${turn.role === "user" ? "You" : turn.model}`);
    parts.push(...(turn.images ?? []).map((url, i) => `![Image ${i + 1}](${url})`));
    if (turn.thought) parts.push(turn.thought.trim().replace(/^/gm, "> "));
    if (turn.text) parts.push(turn.text.trim());
  }
  return `${parts.join("\n\n")}\n`;
}

/** Give the user a text as a file. */
export function download(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** A name for a file, from a title. */
export function fileName(title, ending) {
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60);
  return `${name || "conversation"}.${ending}`;
}
