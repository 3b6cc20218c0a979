// The settings: kept in the browser's storage, edited in a dialog, and turned into fields of a request.

const KEY = "mlxspec.settings";
const DEFAULTS = { model: "", temperature: null, draft: "", thinking: "", system: "", max_tokens: null, seed: null, colour: true, prove: false };
const NUMBERS = {
  temperature: { name: "Temperature", low: 0, high: 100, integer: false },
  max_tokens: { name: "Longest answer", low: 1, high: 10_000_000, integer: true },
  seed: { name: "Seed", low: 0, high: 2 ** 32 - 1, integer: true },
};

export class Settings {
  #storage;

  constructor(storage) {
    this.#storage = storage;
    this.values = { ...DEFAULTS, ...read(storage) };
  }

  /** Whether the browser has kept them. */
  change(values) {
    this.values = { ...this.values, ...values };
    try {
      this.#storage.setItem(KEY, JSON.stringify(this.values));
      return true;
    } catch {
      return false;
    }
  }

  /** The fields of a request that these settings stand for. seed: the one that is drawn where none is set. */
  fields(seed) {
    const { temperature, draft, thinking, prove, max_tokens: longest, seed: own } = this.values;
    return {
      ...(temperature === null ? {} : { temperature }),
      ...(draft ? { draft } : {}),
      ...(thinking ? { enable_thinking: thinking === "on" } : {}),
      ...(prove ? { prove } : {}),
      ...(longest === null ? {} : { max_tokens: longest }),
      seed: own ?? seed,
    };
  }
}

/** What was typed into the fields of numbers: {values} or {field, sentence} for the first that is none. */
export function numbersOf(typed) {
  const values = {};
  for (const [field, { name, low, high, integer }] of Object.entries(NUMBERS)) {
    const text = typed[field].trim();
    const value = text === "" ? null : Number(text);
    const fits = value === null || (Number.isFinite(value) && value >= low && value <= high && (!integer || Number.isInteger(value)));
    if (!fits) {
      const kind = integer ? "a whole number" : "a number";
      return { field, sentence: `${name} must be ${kind} from ${low} to ${high.toLocaleString("en-US")}, or empty.` };
    }
    values[field] = value;
  }
  return { values };
}

/** Only what has the form of a setting: the storage may hold what another version left there. */
function read(storage) {
  let found;
  try {
    found = JSON.parse(storage.getItem(KEY));
  } catch {
    return {};
  }
  const out = {};
  for (const [name, value] of Object.entries(found ?? {})) {
    if (!(name in DEFAULTS)) continue;
    const isNumber = name in NUMBERS;
    if (isNumber ? value === null || (typeof value === "number" && Number.isFinite(value)) : typeof value === typeof DEFAULTS[name]) out[name] = value;
  }
  return out;
}
