// The npm client over every endpoint, whole and streamed. The server's address and key come in OCTAVO_URL, OCTAVO_KEY.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat, zodFunction } from "openai/helpers/zod";
import { z } from "zod";

const model = "smollm2";
const options = { baseURL: `${process.env.OCTAVO_URL}/v1`, apiKey: process.env.OCTAVO_KEY, maxRetries: 0, timeout: 60_000 };
const client = new OpenAI(options);
const messages = [{ role: "user", content: "What is the capital of Italy?" }];
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city.",
      strict: true,
      parameters: {
        type: "object",
        properties: { city: { type: "string", maxLength: 12 }, unit: { enum: ["C", "F"] } },
        required: ["city", "unit"],
        additionalProperties: false,
      },
    },
  },
];
const named = { type: "function", function: { name: "get_weather" } };

const collect = async (stream) => {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
};
const textOf = (chunks, index = 0) =>
  chunks
    .flatMap((chunk) => chunk.choices)
    .filter((choice) => choice.index === index)
    .map((choice) => choice.text ?? choice.delta?.content ?? "")
    .join("");
const rejects = async (promise, kind, check = () => {}) => {
  await assert.rejects(promise, (error) => {
    assert.ok(error instanceof kind, `${error.constructor.name}: ${error.message}`);
    check(error);
    return true;
  });
};

test("models are listed and read by name", async () => {
  const listed = await collect(client.models.list());
  assert.deepEqual(listed.map((entry) => entry.id), [model]);
  assert.deepEqual(await client.models.retrieve(model), listed[0]);
});

test("a chat has every field of the answer", async () => {
  const answer = await client.chat.completions.create({ model, messages, temperature: 0, max_completion_tokens: 24 });
  assert.match(answer.id, /^chatcmpl-/);
  assert.equal(answer.object, "chat.completion");
  assert.equal(answer.choices.length, 1);
  assert.equal(answer.choices[0].message.role, "assistant");
  assert.ok(answer.choices[0].message.content.length > 0);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

for (const n of [1, 3]) {
  test(`a streamed chat of n = ${n} joins to the whole one`, async () => {
    const body = { model, messages, temperature: 1, seed: 11, max_tokens: 12, n };
    const whole = await client.chat.completions.create(body);
    const stream = { stream: true, stream_options: { include_usage: true } };
    const chunks = await collect(await client.chat.completions.create({ ...body, ...stream }));
    assert.equal(whole.choices.length, n);
    for (const choice of whole.choices) assert.equal(textOf(chunks, choice.index), choice.message.content);
    assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
    const reasons = chunks.flatMap((chunk) => chunk.choices.map((choice) => choice.finish_reason)).filter(Boolean);
    assert.equal(reasons.length, n);
  });
}

test("the stream helper makes the same completion", async () => {
  const body = { model, messages, temperature: 0, max_tokens: 12 };
  const whole = await client.chat.completions.create(body);
  const runner = client.chat.completions.stream(body);
  let text = "";
  runner.on("content", (delta) => (text += delta));
  const final = await runner.finalChatCompletion();
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(final.choices[0].message.content, text);
});

test("a stream can be left in the middle", async () => {
  const body = { model, prompt: "x", stream: true, max_tokens: 1000, ignore_eos: true };
  const stream = await client.completions.create(body);
  for await (const chunk of stream) {
    assert.ok(chunk.choices.length);
    break;
  }
  const answer = await client.completions.create({ model, prompt: "x", max_tokens: 2 });
  assert.equal(answer.choices.length, 1);
});

test("log-probabilities of a chat are the same streamed", async () => {
  const body = { model, messages, temperature: 0, max_tokens: 8, logprobs: true, top_logprobs: 3 };
  const content = (await client.chat.completions.create(body)).choices[0].logprobs.content;
  assert.ok(content.every((token) => token.top_logprobs[0].logprob === token.logprob && token.bytes.length > 0));
  const chunks = await collect(await client.chat.completions.create({ ...body, stream: true }));
  assert.deepEqual(chunks.flatMap((chunk) => chunk.choices[0]?.logprobs?.content ?? []), content);
});

test("stop strings end a chat and never show", async () => {
  const body = { model, messages, temperature: 0, max_tokens: 24 };
  const free = (await client.chat.completions.create(body)).choices[0].message.content;
  const stop = free.slice(4, 8);
  const stopped = (await client.chat.completions.create({ ...body, stop: [stop] })).choices[0];
  assert.equal(stopped.message.content, free.slice(0, free.indexOf(stop)));
  assert.equal(stopped.finish_reason, "stop");
});

test("a seed gives the same answer again", async () => {
  const ask = async (seed) =>
    (await client.completions.create({ model, prompt: "Once", seed, max_tokens: 10 })).choices[0].text;
  assert.equal(await ask(5), await ask(5));
  assert.notEqual(await ask(5), await ask(6));
});

test("completions of every kind of prompt, whole and streamed", async () => {
  const body = { model, temperature: 0, max_tokens: 4 };
  const text = await client.completions.create({ ...body, prompt: "The capital of France is" });
  const ids = await client.completions.create({ ...body, prompt: [504, 3575, 282, 4649, 314] });
  assert.equal(text.choices[0].text, ids.choices[0].text);
  const prompt = ["The capital of France is", "Once"];
  const several = await client.completions.create({ ...body, prompt, echo: true, logprobs: 1 });
  const chunks = await collect(await client.completions.create({ ...body, prompt, echo: true, stream: true }));
  several.choices.forEach((choice, index) => {
    assert.equal(choice.index, index);
    assert.ok(choice.text.startsWith(prompt[index]));
    assert.equal(choice.logprobs.tokens.join(""), choice.text);
    assert.equal(textOf(chunks, index), choice.text);
  });
});

for (const tool_choice of ["required", named]) {
  for (const temperature of [0, 1]) {
    const kind = tool_choice === named ? "named" : tool_choice;
    test(`a ${kind} call at temperature ${temperature} has valid arguments, streamed and not`, async () => {
      const body = { model, messages, tools, tool_choice, temperature, seed: 4, max_tokens: 200, parallel_tool_calls: false };
      const whole = (await client.chat.completions.create(body)).choices[0];
      assert.equal(whole.finish_reason, tool_choice === named ? "stop" : "tool_calls");
      assert.equal(whole.message.tool_calls.length, 1);
      const [call] = whole.message.tool_calls;
      assert.equal(call.function.name, "get_weather");
      assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)).sort(), ["city", "unit"]);
      const final = (await client.chat.completions.stream(body).finalChatCompletion()).choices[0];
      assert.equal(final.finish_reason, whole.finish_reason);
      assert.equal(final.message.tool_calls[0].function.arguments, call.function.arguments);
      assert.ok(final.message.tool_calls[0].id);
    });
  }
}

test("with auto the stream says what the whole answer says", async () => {
  const body = { model, messages, tools, temperature: 1, seed: 3, max_tokens: 24 };
  const whole = (await client.chat.completions.create(body)).choices[0];
  const chunks = await collect(await client.chat.completions.create({ ...body, stream: true }));
  assert.equal(textOf(chunks), whole.message.content ?? "");
  assert.equal(chunks.at(-1).choices[0].finish_reason, whole.finish_reason);
});

test("runTools calls a function and goes on with its result", async () => {
  const seen = [];
  const add = {
    type: "function",
    function: {
      name: "add",
      parse: JSON.parse,
      function: (numbers) => {
        seen.push(numbers);
        return String(numbers.a + numbers.b);
      },
      parameters: {
        type: "object",
        properties: { a: { type: "integer", maximum: 99, minimum: 0 }, b: { type: "integer", maximum: 99, minimum: 0 } },
        required: ["a", "b"],
        additionalProperties: false,
      },
    },
  };
  const body = { model, messages, tools: [add], tool_choice: { type: "function", function: { name: "add" } }, max_tokens: 100 };
  const runner = client.chat.completions.runTools({ ...body, temperature: 0 });
  const result = await runner.finalFunctionToolCallResult();
  assert.ok(seen.length >= 1);
  assert.equal(result, String(seen[0].a + seen[0].b));
});

const City = z.object({
  name: z.string().max(12),
  size: z.enum(["small", "large"]),
  population: z.number().int().min(0).max(40_000_000),
});

test("parse gives what zod describes", async () => {
  for (const temperature of [0, 1]) {
    const response_format = zodResponseFormat(City, "city");
    const body = { model, messages, response_format, temperature, seed: 2, max_tokens: 120 };
    const answer = await client.chat.completions.parse(body);
    assert.ok(City.safeParse(answer.choices[0].message.parsed).success, answer.choices[0].message.content);
  }
});

test("a function that zod describes is parsed", async () => {
  const body = { model, messages, tools: [zodFunction({ name: "city", parameters: City })], max_tokens: 150 };
  const tool_choice = { type: "function", function: { name: "city" } };
  const answer = await client.chat.completions.parse({ ...body, tool_choice, temperature: 0 });
  assert.ok(City.safeParse(answer.choices[0].message.tool_calls[0].function.parsed_arguments).success);
});

test("a bad request names its field, whole and streamed", async () => {
  for (const [fields, param] of [
    [{ temperature: 3 }, "temperature"],
    [{ n: 0 }, "n"],
    [{ messages: [] }, "messages"],
    [{ temprature: 1 }, "temprature"],
    [{ temperature: 3, stream: true }, "temperature"],
  ]) {
    await rejects(client.chat.completions.create({ model, messages, ...fields }), OpenAI.BadRequestError, (error) => {
      assert.equal(error.status, 400);
      assert.equal(error.param, param);
      assert.equal(error.type, "invalid_request_error");
      assert.ok(error.requestID);
    });
  }
});

test("other errors have their classes", async () => {
  await rejects(new OpenAI({ ...options, apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
  await rejects(client.models.retrieve("gpt-4"), OpenAI.NotFoundError);
  await rejects(client.completions.create({ model: "gpt-4", prompt: "x" }), OpenAI.NotFoundError, (error) => {
    assert.equal(error.code, "model_not_found");
  });
  await rejects(client.embeddings.create({ model, input: "x" }), OpenAI.NotFoundError);
  const endless = { model, prompt: "x", max_tokens: 2000, ignore_eos: true };
  await rejects(client.completions.create(endless, { timeout: 200 }), OpenAI.APIConnectionTimeoutError);
});

test("raw responses show the headers", async () => {
  const headers = { "X-Request-Id": "mine-2" };
  const body = { model, prompt: "x", max_tokens: 1 };
  const { data, response } = await client.completions.create(body, { headers }).withResponse();
  assert.equal(response.headers.get("x-request-id"), "mine-2");
  assert.equal(data._request_id, "mine-2");
});

test("sixteen requests at once each get their own answer", async () => {
  const ask = async (number) => {
    const body = { model, prompt: "Once", seed: number >> 1, max_tokens: 6 };
    if (number % 2) return (await client.completions.create(body)).choices[0].text;
    return textOf(await collect(await client.completions.create({ ...body, stream: true })));
  };
  const texts = await Promise.all([...Array(16).keys()].map(ask));
  for (let number = 0; number < 16; number += 2) assert.equal(texts[number], texts[number + 1]);
});
