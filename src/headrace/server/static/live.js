// The engine at work, drawn from /stats and /activity.

import { barRow, byId, count, el, percent, svg } from "./dom.js";

const SHOWN_STEPS = 16;
const WIDTH = 640;
const LABEL = 76;
const ROW = 11;

let before = null;

export function drawStats(stats, model) {
  const now = performance.now() / 1000;
  const past = before ?? { stats, now };
  const seconds = Math.max(now - past.now, 1e-3);
  // A server that was started anew counts from nought again.
  const rate = (value, old) => (before && value >= old ? (value - old) / seconds : 0).toFixed(0);
  const cache = stats.prefix_cache;
  tiles({
    "running": count(stats.running),
    "waiting": count(stats.waiting),
    "generated / s": rate(stats.generated_tokens, past.stats.generated_tokens),
    "forward / s": rate(stats.forward_tokens, past.stats.forward_tokens),
    "steps": count(stats.steps),
    "requests done": count(stats.finished_requests),
    "cache hits": percent(cache.hit_tokens, cache.query_tokens),
    "drafts kept": percent(stats.accepted_tokens, stats.draft_tokens),
    "preemptions": count(stats.preemptions),
    "host waits / step": stats.host_waits_per_step.toFixed(2),
  });
  before = { stats, now };
  drawPools(stats, model);
  drawCache(cache);
  drawDrafts(stats);
}

function tiles(values) {
  const list = byId("tiles");
  if (!list.children.length) {
    for (const name of Object.keys(values)) {
      list.append(el("div", {}, el("dt", {}, name), el("dd", { "data-tile": name })));
    }
  }
  for (const place of list.querySelectorAll("dd")) place.textContent = values[place.dataset.tile];
}

function drawPools(stats, model) {
  const named = [["KV", stats.kv_blocks]];
  stats.state_blocks.forEach((pool, index) => {
    named.push([model?.state_groups[index]?.kind ?? `states ${index}`, pool]);
  });
  byId("pools").replaceChildren(...named.filter(([, pool]) => pool.total).map(([name, pool]) =>
    barRow(name.replaceAll("_", " "), [
      { kind: "used", share: pool.used / pool.total },
      { kind: "cached", share: pool.cached / pool.total },
    ], `${count(pool.used)} + ${count(pool.cached)} of ${count(pool.total)}`)));
}

function drawCache(cache) {
  if (!cache.query_tokens) {
    byId("cache").replaceChildren(el("p", { class: "muted" }, "No prompt yet."));
    return;
  }
  const share = (tokens) => tokens / cache.query_tokens;
  const missed = Object.entries(cache.missed_tokens).filter(([, tokens]) => tokens);
  missed.sort((one, other) => other[1] - one[1]);
  byId("cache").replaceChildren(
    barRow("from the cache", [{ kind: "cached", share: share(cache.hit_tokens) }],
      count(cache.hit_tokens)),
    ...missed.map(([reason, tokens]) =>
      barRow(reason.replaceAll("_", " "), [{ kind: "missed", share: share(tokens) }],
        count(tokens))));
}

function drawDrafts(stats) {
  const rows = stats.drafted_by_position.map((drafted, position) => {
    const kept = stats.accepted_by_position[position];
    return drafted && barRow(`draft ${position + 1}`,
      [{ kind: "kept", share: kept / drafted }], percent(kept, drafted));
  }).filter(Boolean);
  byId("drafts").replaceChildren(
    ...(rows.length ? rows : [el("p", { class: "muted" }, "No drafts yet.")]));
}

export function drawActivity(activity) {
  drawSequences(activity.sequences);
  drawSteps(activity.steps.slice(-SHOWN_STEPS));
}

function drawSequences(sequences) {
  const rows = sequences.map((sequence) => el("tr", {}, ...[
    sequence.id,
    sequence.preemptions ? `${sequence.status}, preempted ${sequence.preemptions}×` : sequence.status,
    `${count(Math.min(sequence.computed_tokens, sequence.prompt_tokens))} / ${count(sequence.prompt_tokens)}`,
    count(sequence.cached_tokens),
    `${count(sequence.output_tokens)} / ${count(sequence.max_tokens)}`,
    count(sequence.kv_blocks), count(sequence.state_blocks), `${sequence.age_s.toFixed(1)} s`,
  ].map((value) => el("td", {}, String(value)))));
  if (!rows.length) {
    rows.push(el("tr", {}, el("td", { colspan: "8", class: "muted" }, "None runs or waits.")));
  }
  byId("sequences").replaceChildren(...rows);
}

/** One line a step, oldest above; lines that overlap in time are steps enqueued ahead. */
function drawSteps(steps) {
  if (!steps.length) {
    byId("steps").replaceChildren(el("p", { class: "muted" }, "No step yet."));
    return;
  }
  // After a pause only the newest burst is drawn: else a second of nothing would flatten it.
  let first = steps.length - 1;
  while (first && steps[first].begin_s - steps[first - 1].end_s < 0.2) first -= 1;
  const burst = steps.slice(first);
  const begin = burst[0].begin_s;
  const end = Math.max(...burst.map((step) => step.end_s));
  const x = (time) => LABEL + (WIDTH - LABEL) * (time - begin) / Math.max(end - begin, 1e-6);
  const height = (SHOWN_STEPS + 1.4) * ROW;
  const picture = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${height}`, role: "img",
    "aria-label": `${burst.length} steps in ${((end - begin) * 1000).toFixed(0)} ms`,
  });
  burst.forEach((step, line) => {
    const y = line * ROW;
    const tokens = step.known_tokens + step.generating + step.draft_tokens;
    const parts = [
      ["plan", step.begin_s, step.enqueued_s], ["flight", step.enqueued_s, step.wait_s],
      ["wait", step.wait_s, step.landed_s], ["update", step.landed_s, step.end_s],
    ];
    picture.append(svg("text", { x: 0, y: y + 8 }, `${step.step_id}: ${tokens} tok`));
    const group = svg("g", {}, svg("title", {},
      `step ${step.step_id}: ${step.known_tokens} prompt tokens, ${step.generating} sequences ` +
      `generate, ${step.draft_tokens} drafts, ${((step.end_s - step.begin_s) * 1000).toFixed(1)} ms`));
    for (const [kind, from, to] of parts) {
      group.append(svg("rect", {
        class: kind, x: x(from), y: y + 1, height: ROW - 3,
        width: Math.max(x(to) - x(from), 0.5),
      }));
    }
    picture.append(group);
  });
  const scale = svg("text", { x: WIDTH, y: height - 4, "text-anchor": "end" },
    `${((end - begin) * 1000).toFixed(1)} ms`);
  picture.append(svg("text", { x: LABEL, y: height - 4 }, "0"), scale);
  byId("steps").replaceChildren(picture);
}
