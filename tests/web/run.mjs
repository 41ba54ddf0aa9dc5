// Feeds one program with the tensors that feed.json lists, and writes its outputs beside them.
// usage: node run.mjs FOLDER, which holds program.onnx, feed.json and a file of raw bytes a tensor
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import * as ort from "onnxruntime-web/wasm";

const folder = process.argv[2];
const arrays = { float32: Float32Array, int64: BigInt64Array };

ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create(readFileSync(join(folder, "program.onnx")), {
  executionProviders: ["wasm"],
});
const feed = {};
for (const { name, file, dtype, shape } of JSON.parse(readFileSync(join(folder, "feed.json")))) {
  const bytes = new Uint8Array(readFileSync(join(folder, file)));
  feed[name] = new ort.Tensor(dtype, new arrays[dtype](bytes.buffer), shape);
}
const outputs = await session.run(feed);
const written = Object.entries(outputs).map(([name, tensor], index) => {
  const file = `output${index}`;
  const { buffer, byteOffset, byteLength } = tensor.data;
  writeFileSync(join(folder, file), new Uint8Array(buffer, byteOffset, byteLength));
  return { name, file, dtype: tensor.type, shape: tensor.dims };
});
writeFileSync(join(folder, "outputs.json"), JSON.stringify(written));
