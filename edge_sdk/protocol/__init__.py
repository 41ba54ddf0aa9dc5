"""The contract between devices and the server: topics, messages, transfers (docs/protocol.md)."""

from edge_sdk.protocol.topics import Address, Topics, check_id
from edge_sdk.protocol.transfer import (
    CHUNK_BYTES,
    Chunk,
    Incoming,
    chunk_count,
    decode_chunk,
    encode_chunk,
    reference,
)

__all__ = [
    "CHUNK_BYTES",
    "Address",
    "Chunk",
    "Incoming",
    "Topics",
    "check_id",
    "chunk_count",
    "decode_chunk",
    "encode_chunk",
    "reference",
]
