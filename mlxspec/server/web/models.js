// The dialog for models: those that are served, those that are here, those that fit this machine, and a download with its progress.

import { byId, element } from "./render.js";
import { amount } from "./words.js";

export class Models {
  #api;
  #server;
  #stop = null; // ends the reading of a download's progress
  #fetched = ""; // the model of that download
  #isBusy = false; // whether something is being asked of the server

  /** server: knows the models that are served, and shows them again once there are more. */
  constructor(api, server) {
    this.#api = api;
    this.#server = server;
    byId("open-models").addEventListener("click", () => this.#open());
    byId("models-close").addEventListener("click", () => byId("models").close());
    byId("models").addEventListener("close", () => this.#stop?.abort());
    byId("fetch-cancel").addEventListener("click", () => this.#act(() => this.#api.changeLibrary({ action: "cancel" })));
    byId("fetch-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const name = byId("fetch-name").value.trim();
      if (name) this.#fetch(name);
    });
  }

  async #open() {
    say("");
    wrong("");
    byId("models").showModal();
    await this.#server.refresh(); // an answer may have loaded another model
    const fetching = await this.#show();
    if (fetching) this.#fetch(fetching.model); // this page was left, or another one began it
  }

  /** Show what there is now, under a sentence. Returns the download that runs, null for none. */
  async #show(sentence = "") {
    let found = { here: [], fitting: [], fetching: null };
    byId("library").hidden = false;
    try {
      found = await this.#api.library();
      say(sentence || `This machine has ${amount(found.machine)} for a model.`);
    } catch (error) {
      byId("library").hidden = true;
      say(error.message);
    }
    const served = this.#server.models.map((model) => this.#served(model, found.here));
    const others = found.here.filter(({ served_as }) => served_as === null).map((model) => this.#here(model));
    byId("models-here").replaceChildren(...served, ...others);
    byId("models-fitting").replaceChildren(
      ...found.fitting.map(({ name, size, drafter }) => row(name, `${amount(size)}, drafted by ${drafter}`, "Fetch", () => this.#fetch(name))),
    );
    return found.fetching;
  }

  #served({ id, meta }, here) {
    const size = here.find(({ served_as }) => served_as === id)?.size;
    const said = [size ? amount(size) : "", meta.loaded ? "in memory" : "served"].filter(Boolean).join(", ");
    if (id === this.#server.model?.id) return row(id, `${said}, chosen`);
    return row(id, said, "Choose", () => this.#choose(id));
  }

  #here({ name, size, memory, fits, problem }) {
    if (problem || !fits) return row(name, problem || `${amount(size)}, needs ${amount(memory)} of memory and does not fit`);
    const serve = async () => {
      await this.#api.changeLibrary({ action: "serve", model: name });
      await this.#server.connect();
      this.#choose(name);
    };
    return row(name, `${amount(size)}, takes ${amount(memory)} of memory`, "Use", () => this.#act(serve));
  }

  #choose(id) {
    this.#server.choose(id);
    byId("models").close();
  }

  /** Fetch a model, or watch its download where it runs already. */
  async #fetch(name) {
    byId("models").scrollTop = 0;
    if (this.#stop) {
      wrong(`${this.#fetched} is being fetched; one model is fetched at a time.`);
      return;
    }
    this.#stop = new AbortController();
    this.#fetched = name;
    wrong("");
    byId("fetching").hidden = false;
    byId("fetch-cancel").focus();
    progress(`Asking the hub for ${name}.`);
    try {
      for await (const told of this.#api.pull(name, this.#stop.signal)) {
        if (told.status !== "success") progress(told.status, told.completed, told.total);
        else {
          wrong("");
          await this.#show([`${name} is here.`, ...told.notices].join(" "));
        }
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      await this.#show();
      wrong(error.message);
    } finally {
      this.#stop = null;
      byId("fetching").hidden = true;
      if (byId("models").open) byId("fetch-name").focus();
    }
  }

  async #act(work) {
    if (this.#isBusy) return;
    this.#isBusy = true;
    try {
      await work();
    } catch (error) {
      wrong(error.message);
    }
    this.#isBusy = false;
  }
}

function row(name, said, action = "", onclick = null) {
  const button = action && element("button", { type: "button", class: "small", "aria-label": `${action} ${name}`, onclick }, action);
  return element("li", {}, element("span", {}, element("strong", {}, name), " ", element("span", { class: "muted" }, said)), ...(button ? [button] : []));
}

function progress(what, completed, total) {
  byId("fetch-state").textContent = total ? `${what}: ${amount(completed)} of ${amount(total)}` : what;
  const bar = byId("fetch-bar");
  if (total) Object.assign(bar, { max: total, value: completed });
  else bar.removeAttribute("value");
}

function say(sentence) {
  byId("models-state").textContent = sentence;
}

function wrong(sentence) {
  byId("models-error").textContent = sentence;
}
