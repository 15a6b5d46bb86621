// Explanations of words that the figures use. Each is a tooltip where the word is, and a line in the list of all words.

import {h} from "./patch.js";

const WORDS = {
  parameters: "Weights of the model in the dtype of forward and backward.",
  gradients: "Sums of gradients that wait for the optimizer step.",
  "optimizer state": "fp32 masters and moments of the optimizer.",
  activations: "Tensors that forward keeps for backward.",
  "unsharded groups": "Groups of parameters that are complete on the device now, because a module uses them or soon will.",
  staging: "Host memory through which state and parameters pass between NVMe and the optimizer.",
  "local gradients": "Gradients of this rank that are not yet summed over the ranks.",
  "gradient reduction": "Buffers in which gradients are summed over the ranks.",
  checkpoint: "Buffers through which a checkpoint is written.",
  checksums: "Checksums of the bytes on NVMe.",
  "update window": "Device memory through which the GPU updates state of the host.",
  "idle windows": "Buffers of the budget that nothing uses at this moment.",
  stall: "Time in which compute waits for data.",
  agreement: "A small exchange between ranks, for example of the gradient norm; the wait is for the slowest rank.",
  gather: "Collecting the shards of a group from all ranks.",
  reduce: "Summing gradients over the ranks.",
  broadcast: "Sending values of one rank to all.",
  "while moving": "Average over the time with transfers in flight.",
  peak: "Maximum so far: of the bytes, or of the rate over a quarter of a second.",
  "in flight": "Requests that the drive has not answered yet.",
  p50: "Half of the requests complete within this time.",
  p99: "99 of 100 requests complete within this time.",
  retries: "Requests that were continued after a short transfer, or sent again.",
  heartbeat: "Time since the rank last published its figures.",
  "TFLOP/s": "10^12 operations of the model per second, in forward and backward.",
  stalled: "Share of the time in which compute waited for data.",
  stuck: "A phase of a rank takes far longer than usual: the run hangs.",
  degraded: "A rank on this node is missing, does not publish, or cannot continue.",
  silent: "The process of the rank lives, and has published nothing for ten seconds.",
  stale: "The process of the rank has ended.",
  torn: "The status file of the rank was read while it was being written.",
  unreadable: "The status file of the rank is damaged.",
  unreachable: "The sidecar of the rank's node does not answer.",
  straggler: "The other ranks wait for this one in each step.",
  device: "Memory in which the model computes: that of the GPU, or host memory without one.",
  host: "Main memory of the machine (RAM).",
  NVMe: "Swap files on the drives of the machine.",
  budget: "The most bytes that the engine may use on a tier.",
  phase: "What the rank does now: forward, backward, the optimizer step, or the program between steps.",
  "between phases": "Time of the program between two phases, for example of its data loader.",
  "to device": "Copies from host memory to the device, over its link.",
  "from device": "Copies from the device to host memory, over its link.",
  "while copying": "Average over the time with copies in flight.",
  "gradient norm": "Length of the vector of all gradients, before it is clipped.",
  lr: "Learning rate of the optimizer.",
  "loss scale": "Factor of the loss that keeps small gradients of fp16 from becoming zero.",
  throughput: "Tokens or samples of all ranks per second.",
  pid: "Number of the process of the rank on its node.",
  MFU: "Model FLOPs utilisation: operations of the model per second, as a share of the peak of the GPU.",
};

const copied = "copies of ";

/** `word` with its explanation as a tooltip, if it has one; the style sheet shows it while the word has the focus. */
export function explained(word) {
  const text = word.startsWith(copied)
    ? `Copies between host memory and the device, of ${word.slice(copied.length)}.`
    : (WORDS[word] ?? WORDS[word.toLowerCase()]);
  return text ? h("abbr", {title: text, tabindex: "0"}, word) : word;
}

/** All words, for a reader without a pointer. */
export const words = () =>
  h(
    "dl",
    {class: "words"},
    Object.entries(WORDS).map(([word, text]) => h("div", {key: word}, h("dt", {}, word), h("dd", {}, text))),
  );
