// What the page knows of its server: its models, whether it answers, and the key that it asks for.

import { ApiError, GoneError } from "./api.js";
import { byId, element } from "./render.js";
import { count } from "./words.js";

export const UNKNOWN = "the server's model";
const [FIRST_RETRY_MS, LAST_RETRY_MS] = [1000, 15_000];

export class Server {
  #api;
  #settings;
  #page;
  #models = [];
  #isWaiting = false;

  /** page: {notify(sentence), onmodels(): what is known of the models has changed, onkey(key): the user has given a key} */
  constructor(api, settings, page) {
    this.#api = api;
    this.#settings = settings;
    this.#page = page;
    byId("model").addEventListener("change", ({ target }) => this.choose(target.value));
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#takeKey(byId("key").value.trim());
    });
    byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
  }

  /** Those that are served. */
  get models() {
    return this.#models;
  }

  choose(id) {
    this.#settings.change({ model: id });
    this.#show();
  }

  /** The chosen model, null where none is known. */
  get model() {
    return this.#models.find((model) => model.id === this.#settings.values.model) ?? this.#models[0] ?? null;
  }

  get sees() {
    return this.model?.capabilities?.includes("vision") ?? false;
  }

  /** Tokens of a model's context, null where that is not known. */
  contextOf(name = this.model?.id) {
    return this.#models.find((model) => model.id === name)?.meta.n_ctx ?? null;
  }

  /** The drafters that a model's requests have where they say nothing. */
  draftersOf(name) {
    return this.#models.find((model) => model.id === name)?.meta.draft ?? [];
  }

  async connect() {
    try {
      this.#models = await this.#api.models();
      await this.#untilReady();
      banner("");
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) this.askForKey(this.#api.key ? "The server does not accept this key." : "");
      else if (error instanceof GoneError) await this.untilItAnswers();
      else banner(error.message, "Try again", () => this.connect());
    }
    this.#show();
  }

  /** Ask again which models there are and what is known of them, which it is once they are loaded. */
  async refresh() {
    try {
      this.#models = await this.#api.models();
      this.#show();
    } catch {
      // the next request says what is wrong
    }
  }

  /** The server does not answer: ask again now and then until it does. */
  async untilItAnswers() {
    if (this.#isWaiting) return;
    this.#isWaiting = true;
    for (let wait = FIRST_RETRY_MS; ; wait = Math.min(2 * wait, LAST_RETRY_MS)) {
      banner("The server does not answer. The page asks again every few seconds; the conversation stays.");
      await pause(wait);
      try {
        await this.#api.health();
        break;
      } catch (error) {
        if (error instanceof ApiError) break; // it answers, if only with an error
      }
    }
    this.#isWaiting = false;
    await this.connect();
    if (byId("banner").hidden) this.#page.notify("The server answers again.");
  }

  askForKey(sentence) {
    banner("The server asks for an API key.", "Enter the key", () => this.askForKey(""));
    byId("key-error").textContent = sentence;
    byId("key").value = "";
    if (!byId("key-dialog").open) byId("key-dialog").showModal();
  }

  #takeKey(key) {
    if (!key) {
      byId("key-error").textContent = "The key is empty.";
      return;
    }
    this.#api.key = key;
    this.#page.onkey(key);
    byId("key-dialog").close();
    this.connect();
  }

  /** Wait while the server loads its model. */
  async #untilReady() {
    for (;;) {
      try {
        await this.#api.health();
        this.#models = await this.#api.models();
        return;
      } catch (error) {
        if (!(error instanceof ApiError) || error.code !== "loading") throw error;
        banner("The server is loading its model.");
        await pause(FIRST_RETRY_MS);
      }
    }
  }

  #show() {
    const { model } = this;
    const name = model?.id ?? UNKNOWN;
    const hasChoice = this.#models.length > 1;
    byId("model").hidden = !hasChoice;
    byId("model-name").hidden = hasChoice;
    byId("model-name").textContent = name;
    byId("model").replaceChildren(...this.#models.map(({ id }) => element("option", { value: id, selected: id === model?.id }, id)));
    byId("model-facts").textContent = factsOf(model?.meta);
    byId("model-speed").textContent = model?.meta.measured ?? "";
    this.#page.onmodels();
  }
}

function factsOf(meta) {
  if (!meta) return "";
  return meta.loaded ? `${count(meta.n_ctx, "token")} of context` : "loaded with the first message";
}

/** A sentence above the conversation, "" for none, with a button for what can be done. */
function banner(sentence, action = "", onclick = null) {
  byId("banner").hidden = !sentence;
  byId("banner-text").textContent = sentence;
  const button = byId("banner-button");
  button.hidden = !action;
  button.textContent = action;
  button.onclick = onclick;
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));
