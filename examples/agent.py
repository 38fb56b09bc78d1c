"""An agent written against the OpenAI client: it requests a letter, and once more if the first was wrong.

It contains no code for training. `penstock run examples/agent.toml` trains it.
"""

from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # pyright: ignore[reportMissingImports]

LETTERS = "abcdefgh"
connections = DefaultAsyncHttpxClient()


async def guess(base_url: str, api_key: str, position: int) -> float:
    right = LETTERS[position % len(LETTERS)]
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=connections, max_retries=0)
    messages = [{"role": "user", "content": f"{right}>"}]
    for tries in (1, 2):
        reply = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
        said = reply.choices[0].message.content or ""
        if said == right:
            return 1.0 / tries
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
    return 0.0
