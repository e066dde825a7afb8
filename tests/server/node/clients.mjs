// Calls a server with the official JavaScript client and with the AI SDK.
// `node clients.mjs URL MODEL` prints one JSON object with the result or the error of each scenario.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const question = "when does the lift stop?";
const schema = z.object({ open: z.boolean() }); // short: a random model generates it in few steps
const options = { temperature: 0, maxOutputTokens: 200, maxRetries: 0 };

const official = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const providers = {
  compatible: createOpenAICompatible({
    name: "chairlift", baseURL: `${url}/v1`, supportsStructuredOutputs: true, includeUsage: true,
  })(model),
  responses: createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).responses(model),
};
// The provider for OpenAI refers to earlier answers by id unless `store` is false.
const stateless = { openai: { store: false } };

const lift = tool({
  description: "Whether a lift runs",
  inputSchema: schema,
  execute: async ({ open }) => ({ heard: open }),
});

function summary({ steps }) {
  return {
    calls: steps.map((step) => step.toolCalls.map((call) => call.input)),
    results: steps.map((step) => step.toolResults.map((result) => result.output)),
    finishReasons: steps.map((step) => step.finishReason),
    inputTokens: steps.map((step) => step.usage.inputTokens),
  };
}

const scenarios = {
  async officialChat() {
    const answer = await official.chat.completions.create({
      model, messages: [{ role: "user", content: question }], max_completion_tokens: 12, temperature: 0,
    });
    return { text: answer.choices[0].message.content, tokens: answer.usage.completion_tokens };
  },
  async officialChatStream() {
    const stream = official.chat.completions.stream({
      model, messages: [{ role: "user", content: question }], max_completion_tokens: 12, temperature: 0,
      stream_options: { include_usage: true },
    });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
    const final = await stream.finalChatCompletion();
    return { text, final: final.choices[0].message.content, tokens: final.usage.completion_tokens };
  },
  async officialResponse() {
    const answer = await official.responses.create({ model, input: question, max_output_tokens: 12, temperature: 0 });
    return { text: answer.output_text, status: answer.status, tokens: answer.usage.output_tokens };
  },
  async officialResponseStream() {
    const stream = official.responses.stream({ model, input: question, max_output_tokens: 12, temperature: 0 });
    let text = "", last;
    for await (const event of stream) {
      if (event.type === "response.output_text.delta") text += event.delta;
      if (event.type === "response.incomplete") last = event.response;
    }
    return { text, final: last.output[0].content[0].text, tokens: last.usage.output_tokens };
  },
  async officialParsed() {
    const answer = await official.chat.completions.parse({
      model, messages: [{ role: "user", content: question }], temperature: 0,
      response_format: zodResponseFormat(schema, "lift"),
    });
    const response = await official.responses.parse({
      model, input: question, temperature: 0, text: { format: zodTextFormat(schema, "lift") },
    });
    return { chat: answer.choices[0].message.parsed, response: response.output_parsed };
  },
  async officialTools() {
    const tools = [{ type: "function", name: "lift", parameters: z.toJSONSchema(schema), strict: true }];
    const input = [{ role: "user", content: question }];
    const asked = { model, temperature: 0, tools, parallel_tool_calls: false };
    const first = await official.responses.create({ ...asked, input, tool_choice: "required" });
    const [call] = first.output;
    input.push(...first.output, { type: "function_call_output", call_id: call.call_id, output: "it runs" });
    const last = await official.responses.create({ ...asked, input, tool_choice: "none", max_output_tokens: 4 });
    return { name: call.name, input: JSON.parse(call.arguments), text: last.output_text };
  },
  async officialRefusal() {
    try {
      await official.responses.create({ model, input: question, previous_response_id: "resp_1" });
    } catch (error) {
      return { status: error.status, param: error.param, type: error.type };
    }
  },
};

for (const [name, provider] of Object.entries(providers)) {
  const asked = { model: provider, ...options, providerOptions: stateless };
  const brief = { ...asked, prompt: question, maxOutputTokens: 12 };

  scenarios[`${name}Text`] = async () => {
    const { text, usage, finishReason } = await generateText(brief);
    return { text, tokens: usage.outputTokens, finishReason };
  };
  scenarios[`${name}TextStream`] = async () => {
    const result = streamText({ ...brief, onError: () => {} });
    let text = "", pieces = 0;
    for await (const piece of result.textStream) [text, pieces] = [text + piece, pieces + 1];
    return { text, pieces, tokens: (await result.usage).outputTokens, finishReason: await result.finishReason };
  };
  scenarios[`${name}Object`] = async () => {
    const { object, finishReason } = await generateObject({ ...asked, prompt: question, schema });
    return { object, finishReason };
  };
  scenarios[`${name}ObjectStream`] = async () => {
    const result = streamObject({ ...asked, prompt: question, schema, onError: () => {} });
    let pieces = 0;
    for await (const _ of result.partialObjectStream) pieces += 1;
    return { object: await result.object, pieces };
  };
  // The first step calls the tool, the SDK runs it, the second step gets the result and must call again.
  const oneCall = { openai: { store: false, parallelToolCalls: false }, chairlift: { parallel_tool_calls: false } };
  const agent = {
    ...asked, prompt: question, tools: { lift }, toolChoice: "required", stopWhen: stepCountIs(2),
    providerOptions: oneCall,
  };
  scenarios[`${name}Tools`] = async () => summary(await generateText(agent));
  scenarios[`${name}ToolsStream`] = async () => {
    const result = streamText({ ...agent, onError: () => {} });
    let inputDeltas = 0;
    for await (const part of result.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "tool-input-delta") inputDeltas += 1;
    }
    return { ...summary({ steps: await result.steps }), inputDeltas };
  };
  scenarios[`${name}Turns`] = async () => {
    const messages = [{ role: "system", content: "be brief" }, { role: "user", content: question }];
    const first = await generateText({ ...asked, messages, maxOutputTokens: 6 });
    messages.push(...first.response.messages, { role: "user", content: "and then?" });
    const second = await generateText({ ...asked, messages, maxOutputTokens: 6 });
    return { first: first.text, text: second.text, inputTokens: second.usage.inputTokens };
  };
}

const found = {};
for (const [name, scenario] of Object.entries(scenarios)) {
  try {
    found[name] = await scenario();
  } catch (error) {
    found[name] = { error: String(error), body: error.responseBody ?? null };
  }
}
console.log(JSON.stringify(found));
