# size: shared by the access log and the audit log
"""Count the bytes of one request and its response, for the access log and the audit log."""

from __future__ import annotations

from starlette.types import Message, Receive, Send


class ByteCountingExchange:
    """A request and its response: status, bytes of both bodies, whether sent in full."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.status = self.received_bytes = self.sent_bytes = 0
        self.is_whole = False

    async def receive(self) -> Message:
        """Return the next message of the client."""
        message = await self._receive()
        self.received_bytes += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the answer; it counts once the server has taken it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
        self.sent_bytes += len(message.get("body", b""))
        self.is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
