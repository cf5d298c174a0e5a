// Calls to the server, with the API key if one was given. The key lives as long as the tab.

const KEY = "headrace-key";

export const setKey = (key) => sessionStorage.setItem(KEY, key);

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function call(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  const reply = await fetch(path, { ...options, headers });
  if (!reply.ok) {
    const body = await reply.json().catch(() => null);
    throw new ApiError(reply.status, body?.error?.message ?? `the server answered ${reply.status}`);
  }
  return reply;
}

export const get = async (path) => (await call(path)).json();

/** The events of a streamed answer, parsed, until [DONE]. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: "))
        .map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
