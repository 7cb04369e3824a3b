"""An engine behind SGLang's HTTP server, on this host: started by hand, by Slurm or by a launcher.

The server must have the plugin installed and run as the same user: the sockets of its workers lie in a folder that only
that user can enter. A server may ask for a key, and for another one where it is told what to do.
"""

import json
from collections.abc import Mapping
from typing import Any

from weftpub.errors import ChannelError
from weftpub_adapters.sglang.driver.base import BaseEngine
from weftpub_adapters.sglang.driver.handle import DriverDeadlines
from weftpub_adapters.sglang.driver.loop import LoopThread
from weftpub_adapters.sglang.driver.requests import Ask

__all__ = ["HttpEngine"]

_CONNECT_S = 30.0
_REFUSALS = (401, 403)
_OPTIONS = {"api_key": "--api-key", "admin_key": "--admin-api-key"}  # of the server
_REQUESTS = frozenset({"generate", "model_info", "server_info"})  # SGLang asks for its admin key for all other calls


class HttpEngine(BaseEngine):
    """`EngineHandle` over a running server.

    Args:
        url: such as "http://127.0.0.1:30000".
        api_key: the server's `--api-key`, if it has one.
        admin_key: its `--admin-api-key`, if it has one; by default the same key.
        name: of the engine.
        deadlines: for every wait.
        silence: seconds without a word in the middle of a publish after which its publisher is taken for dead.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        admin_key: str | None = None,
        name: str = "sglang",
        deadlines: DriverDeadlines | None = None,
        silence: float = 180.0,
    ) -> None:
        super().__init__(name, LoopThread(f"http engine {name}"), deadlines, silence)
        self.url = url.rstrip("/")
        self._api_key = admin_key if api_key is None else api_key
        self._admin_key = api_key if admin_key is None else admin_key
        self._client: Any = None  # aiohttp.ClientSession, made on the loop that uses it

    @property
    def where(self) -> str:
        """The engine in words, for messages."""
        return f"engine {self.name} at {self.url}"

    def shutdown(self) -> None:
        """Close the connections; the server is not this handle's and goes on."""

        async def close() -> None:
            if self._client is not None:
                await self._client.close()

        try:
            self._call(close(), "close", self._deadlines.shutdown)
        finally:
            self._loop.close()

    def _require_alive(self) -> None:
        """A server that has ended refuses connections, which ends every wait by itself."""

    async def _send(self, request: str, ask: Ask) -> Mapping[str, Any]:
        return await self._post("generate", {**ask.fields(), "rid": request})

    async def _cancel(self, request: str) -> None:
        await self._post("abort_request", {"rid": request})

    async def _start(self, directory: str, run_id: str, backend: str) -> tuple[bool, str]:
        body = {
            "master_address": directory,
            "master_port": 0,
            "rank_offset": 0,
            "world_size": 0,
            "group_name": run_id,
            "backend": backend,
        }
        answer = await self._post("init_weights_update_group", body, accepted=(200, 400))
        return bool(answer.get("success")), str(answer.get("message", answer))

    async def _stop(self, run_id: str) -> tuple[bool, str]:
        answer = await self._post("destroy_weights_update_group", {"group_name": run_id}, accepted=(200, 400))
        return bool(answer.get("success")), str(answer.get("message", answer))

    async def _pause(self, mode: str) -> None:
        await self._post("pause_generation", {"mode": mode})

    async def _continue(self) -> None:
        await self._post("continue_generation", {"torch_empty_cache": False})

    async def _flush(self) -> bool:
        status, _ = await self._ask("POST", "flush_cache?timeout=0", None)
        if status not in (200, 400):
            raise ChannelError(f"{self.where}: flush_cache was answered with status {status}")
        return status == 200

    async def _release(self, tags: list[str]) -> None:
        await self._post("release_memory_occupation", {"tags": tags})

    async def _bring_back(self, tags: list[str]) -> None:
        await self._post("resume_memory_occupation", {"tags": tags})

    async def _set_version(self, version: str) -> None:
        # The server's default would abort every request in flight.
        await self._post("update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def _version(self) -> str:
        return str((await self._get("model_info")).get("weight_version"))

    async def _info(self) -> Mapping[str, Any]:
        return await self._get("server_info")

    async def _get(self, path: str) -> Mapping[str, Any]:
        return self._checked(path, *await self._ask("GET", path, None), accepted=(200,))

    async def _post(self, path: str, body: Mapping[str, Any], accepted: tuple[int, ...] = (200,)) -> Mapping[str, Any]:
        return self._checked(path, *await self._ask("POST", path, body), accepted=accepted)

    def _checked(self, path: str, status: int, answer: Any, *, accepted: tuple[int, ...]) -> Mapping[str, Any]:
        if status not in accepted:
            raise ChannelError(f"{self.where}: {path} was answered with status {status}: {str(answer)[:500]}")
        if answer and isinstance(answer, str):
            raise ChannelError(
                f"{self.where}: {path} was answered with text instead of JSON, so not by SGLang: {answer[:200]!r}; is "
                "another server, or a proxy, at this address?"
            )
        return answer if isinstance(answer, Mapping) else {}

    def _key_for(self, path: str) -> tuple[str, str | None]:
        """Which key goes with a call, by its name here and its value."""
        if path.partition("?")[0] in _REQUESTS:
            return "api_key", self._api_key
        return "admin_key", self._admin_key

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
        """Status and body of an answer, read as JSON where it is JSON; ChannelError if there is none, or no access."""
        import aiohttp

        if self._client is None:
            unlimited = aiohttp.ClientTimeout(total=None, connect=_CONNECT_S)  # every call has a deadline of its own
            connector = aiohttp.TCPConnector(limit=0)
            self._client = aiohttp.ClientSession(timeout=unlimited, connector=connector)
        name, key = self._key_for(path)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            async with self._client.request(method, f"{self.url}/{path}", json=body, headers=headers) as response:
                text = await response.text("utf-8", errors="replace")
                if response.status in _REFUSALS:
                    fault = "asks for a key" if key is None else f"does not know the {name} it was given"
                    raise ChannelError(
                        f"{self.where}: {path} was refused with status {response.status}: the server {fault}; set "
                        f"{name} to what it was started with as {_OPTIONS[name]}"
                    )
                if not text or response.content_type != "application/json":
                    return response.status, text
                return response.status, json.loads(text)
        except aiohttp.ClientError as error:
            raise ChannelError(
                f"{self.where}: {path} got no answer ({type(error).__name__}: {error}); has the server ended?"
            ) from error
        except ValueError as error:  # after ClientError: an address that is none is both
            raise ChannelError(f"{self.where}: {path} was answered with broken JSON ({error}): {text[:200]}") from error
