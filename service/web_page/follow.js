// The events of the sidecar, read with fetch, because EventSource cannot send a token.

const TOKEN = "tierd-token";
const SILENCE = 40_000; // ms: a comment comes every 15 s when nothing changes
const LONGEST = 30_000; // ms between two attempts

/** The sidecar requires a token, or refused this one. */
export class TokenRequired extends Error {}

let kept = null; // holds the token if the browser blocks site data

/** The result of `access`; null if it throws, because the browser blocks site data. */
function stored(access) {
  try {
    return access();
  } catch {
    return null;
  }
}

export const token = {
  get: () => stored(() => sessionStorage.getItem(TOKEN)) ?? kept,
  keep: text => {
    kept = text;
    stored(() => sessionStorage.setItem(TOKEN, text));
  },
  drop: () => {
    kept = null;
    stored(() => sessionStorage.removeItem(TOKEN));
  },
};

async function ask(address, options = {}) {
  const headers = token.get() ? {Authorization: `Bearer ${token.get()}`} : {};
  const answer = await fetch(address, {...options, headers, cache: "no-store"});
  if (answer.status === 401) throw new TokenRequired(address);
  return answer;
}

async function bodyOf(answer) {
  if (answer.ok) return answer.json();
  const body = await answer.json().catch(() => ({}));
  throw new Error(typeof body.detail === "string" ? body.detail : `it responded with status ${answer.status}`);
}

/** The JSON at `address`. Throws TokenRequired, or an Error with the sidecar's message. */
export async function get(address) {
  return bodyOf(await ask(address, {signal: AbortSignal.timeout(15_000)}));
}

/**
 * Calls `on.status` with every status, `on.lost` with the reason and the ms to the next attempt (null: the sidecar
 * retries by itself), and `on.tokenRequired` if a token is required. Continues until `stop()`; `again()` tries at once. While the
 * sidecar has too many subscribers, the status is polled.
 */
export function follow(on) {
  const stopped = new AbortController();
  let wake = () => {};
  let failed = 0;

  const pause = delay =>
    new Promise(resolve => {
      const timer = setTimeout(resolve, delay);
      wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });

  const receive = status => {
    failed = 0;
    on.status(status);
  };

  const take = event => {
    const field = name =>
      event
        .split("\n")
        .find(line => line.startsWith(`${name}: `))
        ?.slice(name.length + 2);
    if (field("event") === "status") receive(JSON.parse(field("data")));
    else if (field("event") === "problem") on.lost(JSON.parse(field("data")).detail, null);
  };

  async function listen() {
    const silent = new AbortController();
    let timer = setTimeout(() => silent.abort(), SILENCE);
    try {
      const answer = await ask("/v1/events?interval=1", {
        signal: AbortSignal.any([stopped.signal, silent.signal]),
      });
      if (!answer.ok) {
        await answer.body?.cancel();
        receive(await get("/v1/status"));
        return pause(2000);
      }
      const reader = answer.body.getReader(); // streams of Safari cannot be iterated over
      const decoder = new TextDecoder();
      let rest = "";
      for (;;) {
        const {done, value} = await reader.read();
        if (done) break;
        clearTimeout(timer);
        timer = setTimeout(() => silent.abort(), SILENCE);
        const events = (rest + decoder.decode(value, {stream: true})).split("\n\n");
        rest = events.pop();
        for (const event of events) take(event);
      }
      throw new Error("it closed the connection");
    } finally {
      clearTimeout(timer);
    }
  }

  async function run() {
    while (!stopped.signal.aborted) {
      try {
        await listen();
      } catch (error) {
        if (stopped.signal.aborted) return;
        if (error instanceof TokenRequired) {
          on.tokenRequired();
          return;
        }
        const delay = Math.min(LONGEST, 1000 * 2 ** failed++);
        on.lost(reason(error), delay);
        await pause(delay);
      }
    }
  }

  run();
  return {
    stop: () => {
      stopped.abort();
      wake();
    },
    again: () => wake(),
  };
}

// Browsers' own messages for a refused connection ("Failed to fetch", "network error") do not help a reader.
function reason(error) {
  if (error instanceof TypeError) return "the connection failed";
  return error.name === "AbortError" ? "it has sent nothing for 40 s" : error.message;
}
