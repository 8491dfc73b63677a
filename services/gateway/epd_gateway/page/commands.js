// The same request as a command: names of files instead of their bytes, and never the API key itself.
//
// A question: {base, model, question, maxTokens, temperature, pictures: [{name, type}], withKey}. Names and
// texts come from anywhere, so each goes in as a quoted literal, and none into a comment.

export const COMMANDS = { curl, python, nats };

// One word of a POSIX shell.
export const shellWord = (text) => `'${String(text).replaceAll("'", `'\\''`)}'`;

// A path that no program takes for an option.
const path = (name) => (name.startsWith("-") ? `./${name}` : name);

// A JSON string is a Python literal as well, once what JSON leaves bare is escaped.
const pythonText = (text) =>
  JSON.stringify(text).replace(/[\u007f-\u009f\u2028\u2029]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);

function curl({ base, model, question, maxTokens, temperature, pictures, withKey }) {
  const rest = JSON.stringify({ model, max_tokens: maxTokens, temperature, stream: true });
  const text = JSON.stringify({ type: "text", text: question });
  const lines = pictures.length ? ["# in the folder of the pictures"] : [];
  lines.push("{");
  let piece = `${rest.slice(0, -1)},"messages":[{"role":"user","content":[`;
  for (const { name, type } of pictures) {
    piece += `{"type":"image_url","image_url":{"url":"data:${mediaType(type)};base64,`;
    lines.push(`  printf %s ${shellWord(piece)}`, `  base64 <${shellWord(name)} | tr -d '\\n'`);
    piece = '"}},';
  }
  lines.push(`  printf %s ${shellWord(`${piece}${text}]}]}`)}`);
  const key = withKey ? `-H "authorization: Bearer $OPENAI_API_KEY" ` : "";
  lines.push(`} | curl -sSN ${key}-H 'content-type: application/json' --data-binary @- \\`);
  lines.push(`  ${shellWord(`${base}/chat/completions`)}`);
  return `${lines.join("\n")}\n`;
}

function python({ base, model, question, maxTokens, temperature, pictures, withKey }) {
  const text = `{"type": "text", "text": ${pythonText(question)}}`;
  const parts = pictures.map(({ name, type }) => `picture(${pythonText(name)}, ${pythonText(mediaType(type))})`);
  const lines = pictures.length
    ? [
        "# in the folder of the pictures",
        "import base64",
        ...(withKey ? ["import os"] : []),
        "from pathlib import Path",
        "",
      ]
    : withKey
      ? ["import os", ""]
      : [];
  lines.push(
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${pythonText(base)}, api_key=${withKey ? 'os.environ["OPENAI_API_KEY"]' : '"none"'})`,
  );
  if (pictures.length) {
    lines.push(
      "",
      "",
      "def picture(path, kind):",
      "    data = base64.b64encode(Path(path).read_bytes()).decode()",
      '    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}',
      "",
    );
  }
  lines.push(
    "",
    "stream = client.chat.completions.create(",
    `    model=${pythonText(model)},`,
    `    max_tokens=${maxTokens},`,
    `    temperature=${temperature},`,
    "    stream=True,",
    "    messages=[",
    "        {",
    '            "role": "user",',
    "            \"content\": [",
    ...[...parts, text].map((part) => `                ${part},`),
    "            ],",
    "        }",
    "    ],",
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    "print()",
  );
  return `${lines.join("\n")}\n`;
}

function nats({ model, question, maxTokens, temperature, pictures }) {
  const words = pictures.map(({ name }) => `--image ${shellWord(path(name))}`);
  words.push(
    `--text=${shellWord(question)}`,
    `--model ${shellWord(model)}`,
    `--max-tokens ${maxTokens}`,
    `--temperature ${temperature}`,
  );
  return `epd submit \\\n  ${words.join(" \\\n  ")}\n`;
}

const mediaType = (type) => (/^[\w.+-]+\/[\w.+-]+$/.test(type) ? type : "image/png");
