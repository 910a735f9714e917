// Streams one generation with @grpc/grpc-js, as a client of another language would: from the .proto file alone.
// Usage: node stream.mjs <host:port> <folder of protos> <prompt>. Prints each message as a line of JSON.
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [address, protos, prompt] = process.argv.slice(2);
const definition = protoLoader.loadSync("slipstream/v1/generation.proto", {
  includeDirs: [protos],
  keepCase: true,
  enums: String,
  longs: String,
  oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).slipstream.v1;
const client = new GenerationService(address, grpc.credentials.createInsecure());

const call = client.Generate({
  text: prompt,
  sampling: { temperature: 0 },
  stopping: { max_tokens: 8, ignore_eos: true },
});
call.on("data", (message) => console.log(JSON.stringify(message)));
call.on("error", (error) => {
  console.error(error.message);
  process.exitCode = 1;
});
call.on("end", () => client.close());
