"""The JSON Schema of all messages, made from their types: the contract for other languages.

``python -m edge_sdk.protocol.schema docs/protocol.schema.json`` writes it; without a path it is printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from edge_sdk.protocol.messages import PROTOCOL, FromDevice, FromServer


def document() -> str:
    """The schema as JSON text: ``$defs`` holds every message, ``FromDevice`` and ``FromServer``.

    >>> sorted(json.loads(document())["$defs"])[:3]
    ['Augmentation', 'Cancel', 'Declined']
    """
    unions, definitions = msgspec.json.schema_components(
        [FromDevice, FromServer], ref_template="#/$defs/{name}"
    )
    names = ("FromDevice", "FromServer")
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Messages of protocol {PROTOCOL}",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in names],
        "$defs": {**definitions, **dict(zip(names, unions, strict=True))},
    }
    return json.dumps(schema, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(document(), encoding="utf-8")
    else:
        sys.stdout.write(document())
