"""An application of its own that happens to contain a language model."""

import asyncio

import asyncsched


async def clock() -> None:
    """The rest of the application keeps running."""
    while True:
        await asyncio.sleep(0.5)
        print(" ⏱ ", end="", flush=True)


async def main() -> None:
    """Stream one answer while the clock ticks."""
    ticking = asyncio.create_task(clock())
    async with asyncsched.Engine("smollm2-135m") as engine:
        async with engine.stream("The capital of France is", max_tokens=32, temperature=0) as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)
        print(f"\n{stream.finish_reason}: {stream.usage}")
        answer = await engine.chat([{"role": "user", "content": "Name three colours."}], max_tokens=32, temperature=0)
        print(answer.text)
    ticking.cancel()


if __name__ == "__main__":
    asyncio.run(main())
