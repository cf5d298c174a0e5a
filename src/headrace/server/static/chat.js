// The conversation: what was said, one answer at a time, streamed from /v1/chat/completions.

import { call, events } from "./api.js";
import { byId, count, el } from "./dom.js";

const STARTERS = ["Who are you?", "What can you do?", "Hello!"];

let messages = [];
let running = null;
let lifetime = 0; // Counts conversations: an answer that belongs to an older one is dropped.

export function startChat() {
  const form = byId("chat-form");
  const prompt = byId("prompt");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(prompt.value.trim());
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
  for (const text of STARTERS) {
    const button = el("button", { type: "button", class: "quiet" }, text);
    button.addEventListener("click", () => send(text));
    byId("starters").append(button);
  }
}

function clear() {
  lifetime += 1;
  running?.abort();
  messages = [];
  byId("log").replaceChildren(byId("hello"));
  byId("hello").hidden = false;
  showError("");
  byId("prompt").focus();
}

async function send(text) {
  if (!text || running) return;
  const mine = lifetime;
  const answer = addTurns(text);
  const asked = [...messages, { role: "user", content: text }];
  setRunning(new AbortController());
  showError("");
  byId("prompt").value = "";
  try {
    await stream(asked, answer);
    if (mine === lifetime) messages = [...asked, { role: "assistant", content: answer.text }];
  } catch (error) {
    if (mine !== lifetime) return;
    if (error.name === "AbortError") {
      answer.note("stopped");
      messages = [...asked, { role: "assistant", content: answer.text }];
    } else {
      // What failed is no part of the conversation, and can be sent again.
      answer.remove();
      showError(error.message);
      byId("prompt").value = text;
    }
  } finally {
    setRunning(null);
  }
}

async function stream(asked, answer) {
  const began = performance.now();
  const reply = await call("/v1/chat/completions", {
    method: "POST",
    signal: running.signal,
    headers: { "content-type": "application/json" },
    body: JSON.stringify({
      messages: asked, stream: true, stream_options: { include_usage: true },
      temperature: byId("temperature").valueAsNumber, max_tokens: byId("max-tokens").valueAsNumber,
    }),
  });
  let finish = null;
  let usage = null;
  for await (const event of events(reply)) {
    if (event.error) throw new Error(event.error.message);
    usage = event.usage ?? usage;
    const choice = event.choices[0];
    if (!choice) continue;
    answer.append(choice.delta.content ?? "", choice.delta.reasoning_content ?? "");
    finish = choice.finish_reason ?? finish;
  }
  const seconds = (performance.now() - began) / 1000;
  const notes = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    notes.push(`${count(usage.completion_tokens)} tokens in ${seconds.toFixed(2)} s`);
    notes.push(`${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens from the cache`);
  }
  if (finish === "length") notes.push("cut at the limit of tokens");
  answer.note(notes.join(" · "));
}

function addTurns(text) {
  const log = byId("log");
  byId("hello").hidden = true;
  const said = el("div", { class: "turn user" }, el("span", { class: "hidden" }, "You: "),
    el("div", { class: "text" }, text));
  const body = el("div", { class: "text" });
  const turn = el("div", { class: "turn assistant" },
    el("span", { class: "hidden" }, "Model: "), body);
  log.append(said, turn);
  log.scrollTop = log.scrollHeight;
  let thought = null;
  return {
    text: "",
    append(content, reasoning) {
      // Whoever scrolled up to read stays there.
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      if (reasoning) {
        if (!thought) {
          thought = el("div");
          turn.insertBefore(el("details", { open: "" }, el("summary", {}, "Reasoning"), thought), body);
        }
        thought.append(reasoning);
      }
      this.text += content;
      body.append(content);
      if (follows) log.scrollTop = log.scrollHeight;
    },
    note(words) {
      turn.append(el("p", { class: "figures" }, words));
      log.scrollTop = log.scrollHeight;
    },
    remove() {
      said.remove();
      turn.remove();
    },
  };
}

function setRunning(controller) {
  running = controller;
  byId("send").disabled = Boolean(controller);
  byId("stop").hidden = !controller;
  // Read out when it is whole, not token by token.
  byId("log").setAttribute("aria-busy", String(Boolean(controller)));
}

function showError(message) {
  byId("chat-error").textContent = message;
  byId("chat-error").hidden = !message;
}
