// The dialogs for settings and for connecting other programs.

import { byId, copyButton, element } from "./render.js";
import { numbersOf } from "./settings.js";
import { curl, sdk } from "./words.js";

const FIELDS = ["temperature", "max_tokens", "seed", "thinking", "system"]; // beside drafting and tint
const CHECKS = ["colour", "prove"];
const NUMBERS = FIELDS.slice(0, 3);

/** meta: of the current model. */
export function openSettings({ values }, meta) {
  const names = meta?.drafters ?? [];
  const own = names.length ? `as the server does (${meta.draft.join(", ") || "off"})` : "as the server does";
  const options = [["", own], ["off", "off"], ...names.map((name) => [name, name])];
  byId("draft").replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  byId("draft").value = options.some(([value]) => value === values.draft) ? values.draft : "";
  for (const name of FIELDS) fieldOf(name).value = values[name] ?? "";
  for (const name of NUMBERS) fieldOf(name).placeholder = meta?.defaults?.[name] ?? "";
  for (const name of CHECKS) byId(name).checked = values[name];
  wrong(null, "");
  byId("settings").showModal();
}

/** onsave(kept): called after new settings hold; whether the browser has kept them. */
export function onSettings(settings, onsave) {
  byId("settings-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const typed = (name) => (fieldOf(name).validity.badInput ? "?" : fieldOf(name).value);
    const found = numbersOf(Object.fromEntries(NUMBERS.map((name) => [name, typed(name)])));
    if (!found.values) {
      wrong(found.field, found.sentence);
      return;
    }
    const chosen = Object.fromEntries(["draft", "thinking", "system"].map((name) => [name, fieldOf(name).value]));
    const kept = settings.change({ ...found.values, ...chosen, ...Object.fromEntries(CHECKS.map((name) => [name, byId(name).checked])) });
    byId("settings").close();
    onsave(kept);
  });
  byId("settings-cancel").addEventListener("click", () => byId("settings").close());
}

function fieldOf(name) {
  return byId("settings-form").elements[name];
}

function wrong(field, sentence) {
  byId("settings-error").textContent = sentence;
  for (const name of NUMBERS) {
    fieldOf(name).setAttribute("aria-invalid", String(name === field));
    if (name === field) fieldOf(name).focus();
  }
}

export function openConnect(api) {
  const base = `${api.base}v1`;
  byId("base").textContent = base;
  const shown = [
    ["Claude Code; codex and opencode too", `${api.key ? "MLXSPEC_API_KEY=KEY " : ""}mlxspec launch claude --port ${location.port || 80}`],
    ["From a terminal", curl(base, Boolean(api.key))],
    ["From Python, with the openai package", sdk(base, Boolean(api.key))],
  ];
  byId("snippets").replaceChildren(
    ...shown.map(([title, text]) =>
      element(
        "div",
        { class: "code snippet" },
        element("div", { class: "bar" }, element("span", {}, title), copyButton(() => text, `Copy: ${title}`)),
        element("pre", {}, element("code", {}, text)),
      ),
    ),
  );
  byId("connect-close").onclick = () => byId("connect").close();
  byId("connect").showModal();
}
