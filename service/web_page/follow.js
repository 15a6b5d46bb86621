// What the sidecar says, as it says it: its events, over fetch, because EventSource cannot send a token.

const TOKEN = "tierd-token";
const SILENCE = 40_000; // ms: a comment comes every 15 s when nothing changes
const LONGEST = 30_000; // ms between two attempts

/** The sidecar wants a token, or another one. */
export class TokenWanted extends Error {}

let kept = null; // where site data are blocked, the token lives as long as this document

/** Runs `what`; a browser that blocks site data throws, and null is what it remembers then. */
function stored(what) {
  try {
    return what();
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
  if (answer.status === 401) throw new TokenWanted(address);
  return answer;
}

async function told(answer) {
  if (answer.ok) return answer.json();
  const body = await answer.json().catch(() => ({}));
  throw new Error(typeof body.detail === "string" ? body.detail : `it answered ${answer.status}`);
}

/** The JSON at `address`. Throws TokenWanted, or an Error in the sidecar's words. */
export async function get(address) {
  return told(await ask(address, {signal: AbortSignal.timeout(15_000)}));
}

/**
 * Calls `on.status` with every status, `on.lost` with the reason and the ms to the next attempt (null: the sidecar
 * tries by itself), and `on.wanted` where a token is. Goes on until `stop()`; `again()` tries at once. While the
 * sidecar has no room for one more subscriber, it is asked now and then.
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

  const heard = status => {
    failed = 0;
    on.status(status);
  };

  const take = event => {
    const field = name =>
      event
        .split("\n")
        .find(line => line.startsWith(`${name}: `))
        ?.slice(name.length + 2);
    if (field("event") === "status") heard(JSON.parse(field("data")));
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
        heard(await get("/v1/status"));
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
        if (error instanceof TokenWanted) {
          on.wanted();
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

// What browsers say of a refused connection ("Failed to fetch", "network error") tells nobody anything.
function reason(error) {
  if (error instanceof TypeError) return "the connection failed";
  return error.name === "AbortError" ? "it has been silent for 40 s" : error.message;
}
