// What the page holds: the conversation that is shown, those that run, the settings, and what this tab keeps. Draws nothing.

import { Api } from "./api.js";
import { Conversation } from "./conversation.js";
import { Settings } from "./settings.js";

const KEY = "mlxspec.key";
export const [OPEN, TYPED] = ["mlxspec.open", "mlxspec.typed"]; // what a tab keeps beside the API key: the id of its conversation, a message that is not sent yet

const session = storageOf("sessionStorage");
export const settings = new Settings(storageOf("localStorage"));
export const api = new Api(new URL(".", document.baseURI).href, remembered(KEY));

export const state = {
  conversation: new Conversation(), // the one that is shown
  store: null, // where conversations are kept, null where the browser keeps nothing
  isLeaving: false, // whether the browser goes to another page
};
export const alive = new Set(); // conversations with a request in progress: their `run` is {controller, turn, spoken: blocks that were announced}

/** A storage of the browser, or null where it is switched off. */
function storageOf(name) {
  try {
    return window[name];
  } catch {
    return null;
  }
}

/** Read what this tab keeps under a key, "" where there is nothing. */
export function remembered(key) {
  return session?.getItem(key) ?? "";
}


export const rememberKey = (key) => remember(KEY, key);

/** Keep a text until this tab is closed, over reloads too, where the browser does that. */
export function remember(key, value) {
  try {
    session.setItem(key, value);
  } catch {
    // a key is asked for again, and a reload begins a new conversation
  }
}

/** The conversation of this id that has a request in progress here. */
export function aliveOf(id) {
  return [...alive].find((one) => one.id === id);
}

/** A turn of the user. */
export function userTurn(text, urls) {
  return { role: "user", text, ...(urls?.length ? { images: urls } : {}) };
}

export function systemOf() {
  return settings.values.system.trim() ? { system: settings.values.system } : {};
}

/**
 * The body of a request. asked: its fields, the system prompt among them. number: of the turn that is to be answered. forgotten: turns at the
 * beginning that the model is not shown.
 */
export function requestOf(own, asked, number, forgotten = 0) {
  const { system, ...fields } = asked;
  return {
    ...fields,
    messages: own.messages(forgotten, number, system),
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
    timings_per_token: true,
    return_drafted: true,
  };
}
