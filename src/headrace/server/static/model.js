// The model's layers and memory as a picture, drawn once from /model and the sizes of the pools.

import { barRow, byId, bytes, count, el } from "./dom.js";

export function drawModel(model, stats) {
  byId("model-name").textContent = model.name;
  const cache = model.min_cacheable_prefix_tokens;
  byId("model-summary").textContent = [
    model.architecture, `${count(model.parameters)} parameters`, `${model.dtype} on ${model.device}`,
    `states in ${model.state_dtype}`, `up to ${count(model.max_model_len)} tokens`,
    `speculation ${model.speculative}`,
    model.prefix_cache === "none" ? "no prefix cache" : `prefixes hit from ${count(cache)} tokens on`,
  ].join(" · ");
  drawLayers(model);
  drawMemory(model, stats);
  drawContexts(model);
}

function drawLayers(model) {
  const kinds = [...new Set(model.layers.map((layer) => layer.kind))];
  // The colours of the two memories: keys and values, and states, which come in kinds.
  const withState = new Set(model.state_groups.flatMap((group) => group.layers));
  const stateful = kinds.filter((kind) =>
    model.layers.some((layer) => layer.kind === kind && withState.has(layer.index)));
  const style = (kind) => {
    const place = stateful.indexOf(kind);
    if (place >= 0) return `layer-state-${place % 3}`;
    return kind.includes("attention") ? "layer-kv" : "layer-other";
  };
  byId("layer-legend").replaceChildren(...kinds.flatMap((kind) => {
    const number = model.layers.filter((layer) => layer.kind === kind).length;
    return [el("span", { class: `key ${style(kind)}` }),
      `${number} × ${kind.replaceAll("_", " ")}`];
  }));
  if (model.mtp_layers) byId("layer-legend").append(` · and ${model.mtp_layers} that draft (MTP)`);
  byId("layers").replaceChildren(...model.layers.map((layer) =>
    el("li", { class: style(layer.kind), title: `layer ${layer.index}: ${layer.kind}`,
      "aria-label": `layer ${layer.index}: ${layer.kind}` }, String(layer.index))));
}

function drawMemory(model, stats) {
  const parts = [["weights", "weights", model.weight_bytes]];
  const kv = model.kv_bytes_per_token * model.block_size * stats.kv_blocks.total;
  if (kv) parts.push(["keys and values", "kv", kv]);
  model.state_groups.forEach((group, index) => {
    parts.push([group.kind.replaceAll("_", " "), "state",
      group.bytes_per_block * stats.state_blocks[index].total]);
  });
  const most = Math.max(...parts.map(([, , size]) => size));
  byId("memory").replaceChildren(...parts.map(([name, kind, size]) =>
    barRow(name, [{ kind, share: size / most }], bytes(size))));
}

function drawContexts(model) {
  const rows = model.fits.map((fit) => ({
    fit, kv: fit.context_tokens * model.kv_bytes_per_token, state: model.state_bytes_per_sequence,
  }));
  const most = Math.max(...rows.map((row) => row.kv + row.state));
  byId("contexts").replaceChildren(...rows.map(({ fit, kv, state }) =>
    barRow(`${count(fit.context_tokens)} tokens`, [
      { kind: "state", share: state / most }, { kind: "kv", share: kv / most },
    ], `${bytes(kv + state)}, fits ${count(fit.sequences)}×`)));
}
