// Starts the page, and asks the server how it is for as long as somebody looks.

import { ApiError, get, setKey } from "./api.js";
import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { drawActivity, drawStats } from "./live.js";
import { drawModel } from "./model.js";

const BUSY_MS = 400;
const IDLE_MS = 1500;

let model = null;
let timer = 0;

function setStatus(state, text) {
  byId("status").dataset.state = state;
  // Said once, not at every look: it is read out.
  if (byId("status").textContent !== text) byId("status").textContent = text;
}

async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  let pause = IDLE_MS;
  try {
    const [stats, activity] = await Promise.all([get("/stats"), get("/activity")]);
    if (!model) {
      model = await get("/model");
      drawModel(model, stats);
    }
    drawStats(stats, model);
    drawActivity(activity);
    const busy = stats.running + stats.waiting > 0;
    if (busy) pause = BUSY_MS;
    setStatus(busy ? "busy" : "ready", busy ? "working" : "ready");
    byId("key-form").hidden = true;
  } catch (error) {
    const refused = error instanceof ApiError;
    byId("key-form").hidden = !(refused && error.status === 401);
    setStatus("bad", refused ? error.message : "the server cannot be reached");
  }
  clearTimeout(timer);
  timer = setTimeout(look, pause);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  look();
});
byId("chat-form").addEventListener("submit", () => setTimeout(look, 100));
document.addEventListener("visibilitychange", look);
startChat();
look();
