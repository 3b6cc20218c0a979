// The openai package of JavaScript against a server: chat, stream, tools, JSON schema, log-probabilities.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [base, given] = process.argv.slice(2);
const { tools, schema } = JSON.parse(given);
const client = new OpenAI({ baseURL: base, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "what does os.path.join do?" }];
const ask = (more) => client.chat.completions.create({ model: "demo", messages, max_tokens: 100, ...more });

const whole = await ask({ max_tokens: 20 });
assert.equal(whole.usage.completion_tokens, 20);

let text = "";
let usage = null;
const stream = await ask({ max_tokens: 20, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, 20);

const forced = { tools, tool_choice: "required", parallel_tool_calls: false };
const called = await ask(forced);
assert.equal(called.choices[0].finish_reason, "tool_calls");
const wanted = JSON.parse(called.choices[0].message.tool_calls[0].function.arguments);
const runner = client.chat.completions.stream({ model: "demo", messages, max_tokens: 100, ...forced });
const final = await runner.finalChatCompletion();
assert.deepEqual(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments), wanted);

const shaped = await ask({ response_format: { type: "json_schema", json_schema: { name: "thing", schema, strict: true } } });
assert.deepEqual(Object.keys(JSON.parse(shaped.choices[0].message.content)).sort(), Object.keys(schema.properties).sort());

const sure = await ask({ max_tokens: 4, logprobs: true, top_logprobs: 2 });
assert.equal(sure.choices[0].logprobs.content.length, 4);
assert.equal(sure.choices[0].logprobs.content[0].top_logprobs.length, 2);

await assert.rejects(ask({ temperature: -1 }), OpenAI.BadRequestError);
console.log("all of it works");
