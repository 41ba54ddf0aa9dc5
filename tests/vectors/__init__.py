"""Golden vectors and the code that makes them from docs/protocol.md alone: nothing here imports the SDK."""
