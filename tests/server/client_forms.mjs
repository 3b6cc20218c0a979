// The packages @anthropic-ai/sdk, openai (Responses) and ai with its providers against a server: text, stream, a tool, an error.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, streamText, tool } from "ai";

const [base, given] = process.argv.slice(2);
const { schema } = JSON.parse(given);
const question = "what does os.path.join do?";
const quiet = { type: "disabled" };

{
  const client = new Anthropic({ baseURL: base.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0 });
  const messages = [{ role: "user", content: question }];
  const ask = { model: "demo", max_tokens: 20, messages, thinking: quiet };
  const whole = await client.messages.create(ask);
  const stream = client.messages.stream(ask);
  const final = await stream.finalMessage();
  assert.equal(final.content[0].text, whole.content[0].text);
  assert.equal(final.usage.output_tokens, 20);
  const tools = [{ name: "look_up", input_schema: schema }];
  const called = await client.messages.stream({ ...ask, max_tokens: 150, tools, tool_choice: { type: "any" } }).finalMessage();
  assert.equal(called.stop_reason, "tool_use");
  assert.deepEqual(Object.keys(called.content.at(-1).input).sort(), Object.keys(schema.properties).sort());
  assert.ok((await client.messages.countTokens({ model: "demo", messages })).input_tokens > 5);
  await assert.rejects(client.messages.create({ ...ask, temperature: -1 }), Anthropic.BadRequestError);
  console.log("anthropic");
}
{
  const client = new OpenAI({ baseURL: base, apiKey: "none", maxRetries: 0 });
  const ask = { model: "demo", input: question, max_output_tokens: 20, enable_thinking: false };
  const whole = await client.responses.create(ask);
  let text = "";
  for await (const event of await client.responses.create({ ...ask, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, whole.output_text);
  const tools = [{ type: "function", name: "look_up", parameters: schema, strict: false }];
  const called = await client.responses.create({ ...ask, max_output_tokens: 150, tools, tool_choice: "required", parallel_tool_calls: false });
  assert.deepEqual(Object.keys(JSON.parse(called.output[0].arguments)).sort(), Object.keys(schema.properties).sort());
  const history = [{ role: "user", content: question }, ...whole.output, { role: "user", content: "and sorted?" }];
  const next = await client.responses.create({ ...ask, input: history });
  assert.ok(next.usage.input_tokens > whole.usage.input_tokens);
  await assert.rejects(client.responses.create({ ...ask, background: true }), OpenAI.BadRequestError);
  console.log("openai responses");
}
for (const [name, model] of [
  ["openai", createOpenAI({ baseURL: base, apiKey: "none" }).responses("demo")],
  ["anthropic", createAnthropic({ baseURL: base, apiKey: "none" })("demo")],
]) {
  const whole = await generateText({ model, prompt: question, maxOutputTokens: 20, maxRetries: 0 });
  assert.ok(whole.text.length + (whole.reasoningText ?? "").length > 0);
  let length = 0;
  const stream = streamText({ model, prompt: question, maxOutputTokens: 20, maxRetries: 0 });
  for await (const part of stream.fullStream) {
    assert.notEqual(part.type, "error", JSON.stringify(part.error));
    length += (part.text ?? part.delta ?? "").length;
  }
  assert.ok(length > 0);
  const found = [];
  await generateText({
    model, prompt: question, maxOutputTokens: 200, maxRetries: 0, toolChoice: "required",
    tools: { look_up: tool({ description: "Look up.", inputSchema: jsonSchema(schema), execute: async (input) => found.push(input) }) },
  });
  assert.ok(found.length > 0);
  console.log(`ai sdk ${name}`);
}
console.log("all of it works");
