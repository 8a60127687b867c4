// A small Llama in JavaScript that answers SpecVerify's protocol: node greedy_llama.mjs
//
// It computes in float32 weights and float64 sums, one token after the other, with a KV cache. GREEDY_LLAMA_FAULT
// plants an error: "mask" hides the first token, "crash" ends it in the middle, "hang" answers nothing more, "chatty"
// prints beside answers, "short" returns a token too few.
import { readFileSync, readdirSync } from "node:fs";
import { createInterface } from "node:readline";
import { join } from "node:path";

const FAULT = process.env.GREEDY_LLAMA_FAULT ?? "";

const DECLARATION = {
  name: "greedy-llama-js",
  takes: ["checkpoint", "stops"],
  dtypes: ["float32"],
  families: ["llama"],
};

class Unsupported extends Error {}

function tensors(folder) {
  const found = {};
  for (const name of readdirSync(folder).filter((one) => one.endsWith(".safetensors"))) {
    const bytes = readFileSync(join(folder, name));
    const length = Number(bytes.readBigUInt64LE(0));
    const header = JSON.parse(bytes.subarray(8, 8 + length).toString("utf8"));
    for (const [key, entry] of Object.entries(header)) {
      if (key === "__metadata__") continue;
      if (entry.dtype !== "F32") throw new Error(`${key} is ${entry.dtype}, expected F32`);
      const [begin, end] = entry.data_offsets;
      const copy = bytes.subarray(8 + length + begin, 8 + length + end);
      found[key] = new Float32Array(copy.buffer.slice(copy.byteOffset, copy.byteOffset + copy.byteLength));
    }
  }
  return found;
}

const times = (matrix, vector) => {
  const rows = matrix.length / vector.length;
  const product = new Float64Array(rows);
  for (let row = 0; row < rows; row++) {
    let sum = 0;
    for (let at = 0; at < vector.length; at++) sum += matrix[row * vector.length + at] * vector[at];
    product[row] = sum;
  }
  return product;
};

const normed = (vector, weight, epsilon) => {
  const scale = 1 / Math.sqrt(vector.reduce((sum, one) => sum + one * one, 0) / vector.length + epsilon);
  return vector.map((one, at) => one * scale * weight[at]);
};

class Llama {
  constructor(folder) {
    this.config = JSON.parse(readFileSync(join(folder, "config.json"), "utf8"));
    this.weights = tensors(folder);
    this.width = this.config.head_dim ?? this.config.hidden_size / this.config.num_attention_heads;
    this.turns = Llama.turns(this.config.rope_parameters ?? {}, this.width / 2);
    this.strength = Llama.strength(this.config.rope_parameters ?? {});
  }

  // Radians a position for each pair of a head, as the kind of rotary embedding says.
  static turns(rope, half) {
    const kind = rope.rope_type ?? "default";
    return Array.from({ length: half }, (_, at) => {
      const turn = (rope.rope_theta ?? 10000) ** (-at / half);
      // Dynamic scaling begins beyond the longest sequence that the config admits.
      if (kind === "default" || kind === "dynamic") return turn;
      if (kind === "linear") return turn / rope.factor;
      if (kind === "yarn") return Llama.yarn(rope, half, at, turn);
      if (kind !== "llama3") throw new Unsupported(`rotary embedding of type ${kind}`);
      const { factor, low_freq_factor: low, high_freq_factor: high } = rope;
      const rounds = (rope.original_max_position_embeddings * turn) / (2 * Math.PI);
      const share = Math.min(1, Math.max(0, (rounds - low) / (high - low)));
      return share * turn + ((1 - share) * turn) / factor;
    });
  }

  static yarn(rope, half, at, turn) {
    const place = (rounds) =>
      (half * Math.log(rope.original_max_position_embeddings / (rounds * 2 * Math.PI))) / Math.log(rope.rope_theta);
    let [low, high] = [place(rope.beta_fast ?? 32), place(rope.beta_slow ?? 1)];
    if (rope.truncate ?? true) [low, high] = [Math.floor(low), Math.ceil(high)];
    [low, high] = [Math.max(low, 0), Math.min(high, 2 * half - 1)];
    if (low === high) high += 0.001;
    const share = Math.min(1, Math.max(0, (at - low) / (high - low)));
    return (share * turn) / rope.factor + (1 - share) * turn;
  }

  // What cosine and sine are multiplied with.
  static strength(rope) {
    if (rope.rope_type !== "yarn") return 1;
    const scale = (by) => (rope.factor <= 1 ? 1 : 0.1 * by * Math.log(rope.factor) + 1);
    const apart = rope.mscale && rope.mscale_all_dim;
    return rope.attention_factor || (apart ? scale(rope.mscale) / scale(rope.mscale_all_dim) : scale(1));
  }

  weight(layer, name) {
    return this.weights[`model.layers.${layer}.${name}.weight`];
  }

  projected(layer, name, inputs) {
    const bias = this.weights[`model.layers.${layer}.${name}.bias`];
    const product = times(this.weight(layer, name), inputs);
    return bias ? product.map((one, at) => one + bias[at]) : product;
  }

  rotated(vector, position) {
    const half = this.width / 2;
    for (let head = 0; head < vector.length; head += this.width) {
      for (let at = 0; at < half; at++) {
        const angle = position * this.turns[at];
        const [cosine, sine] = [this.strength * Math.cos(angle), this.strength * Math.sin(angle)];
        const [left, right] = [vector[head + at], vector[head + half + at]];
        vector[head + at] = left * cosine - right * sine;
        vector[head + half + at] = right * cosine + left * sine;
      }
    }
    return vector;
  }

  attended(layer, inputs, cache) {
    const position = cache[layer].keys.length;
    const query = this.rotated(this.projected(layer, "self_attn.q_proj", inputs), position);
    cache[layer].keys.push(this.rotated(this.projected(layer, "self_attn.k_proj", inputs), position));
    cache[layer].values.push(this.projected(layer, "self_attn.v_proj", inputs));
    const mates = this.config.num_attention_heads / this.config.num_key_value_heads;
    const out = new Float64Array(query.length);
    for (let head = 0; head < this.config.num_attention_heads; head++) {
      const [mine, its] = [head * this.width, Math.floor(head / mates) * this.width];
      const scores = cache[layer].keys.map((key, column) => {
        if (FAULT === "mask" && column === 0 && position > 0) return -Infinity;
        let sum = 0;
        for (let at = 0; at < this.width; at++) sum += query[mine + at] * key[its + at];
        return sum / Math.sqrt(this.width);
      });
      const most = Math.max(...scores);
      const shares = scores.map((score) => Math.exp(score - most));
      const whole = shares.reduce((sum, share) => sum + share, 0);
      cache[layer].values.forEach((value, column) => {
        for (let at = 0; at < this.width; at++) out[mine + at] += (shares[column] / whole) * value[its + at];
      });
    }
    return this.projected(layer, "self_attn.o_proj", out);
  }

  logits(token, cache) {
    const { hidden_size: size, num_hidden_layers: layers, rms_norm_eps: epsilon } = this.config;
    const table = this.weights["model.embed_tokens.weight"];
    let state = Float64Array.from(table.subarray(token * size, (token + 1) * size));
    for (let layer = 0; layer < layers; layer++) {
      const inputs = normed(state, this.weight(layer, "input_layernorm"), epsilon);
      const seen = this.attended(layer, inputs, cache);
      state = state.map((one, at) => one + seen[at]);
      const next = normed(state, this.weight(layer, "post_attention_layernorm"), epsilon);
      const up = this.projected(layer, "mlp.up_proj", next);
      const gate = this.projected(layer, "mlp.gate_proj", next);
      const fed = this.projected(layer, "mlp.down_proj", up.map((one, at) => (one * gate[at]) / (1 + Math.exp(-gate[at]))));
      state = state.map((one, at) => one + fed[at]);
    }
    const last = normed(state, this.weights["model.norm.weight"], epsilon);
    return times(this.weights["lm_head.weight"] ?? table, last);
  }

  *greedy(prompt, most, stops) {
    const cache = Array.from({ length: this.config.num_hidden_layers }, () => ({ keys: [], values: [] }));
    let row;
    for (const token of prompt) row = this.logits(token, cache);
    for (let count = 0; count < most; count++) {
      const token = row.indexOf(Math.max(...row));
      yield token;
      if (stops.includes(token)) return;
      row = this.logits(token, cache);
    }
  }
}

let open = { folder: "", model: null };

function generated({ prompt_ids: prompt, max_new_tokens: most, checkpoint, stops = [] }) {
  if (open.folder !== checkpoint) open = { folder: checkpoint, model: new Llama(checkpoint) };
  if (FAULT === "crash") throw new RangeError("planted");
  return [...open.model.greedy(prompt, FAULT === "short" ? Math.max(1, most - 1) : most, stops)];
}

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  if (FAULT === "hang" && request.ask === "generate") await new Promise(() => setInterval(() => {}, 1000));
  if (FAULT === "chatty" && request.ask === "generate") console.log("loading the model ...");
  let answer;
  try {
    answer = request.ask === "declare" ? { declaration: DECLARATION } : { tokens: generated(request) };
  } catch (why) {
    if (!(why instanceof Unsupported)) throw why;
    answer = { unsupported: why.message };
  }
  console.log(JSON.stringify({ id: request.id, ...answer }));
}
