"""How messages travel. ``Transport`` is the seam: MQTT for real, memory for fast tests."""

from edge_sdk.transport.events import Connected, Disconnected, Event, Received, Transport, Will
from edge_sdk.transport.memory import MemoryBroker
from edge_sdk.transport.mqtt import Credentials, MqttTransport

__all__ = [
    "Connected",
    "Credentials",
    "Disconnected",
    "Event",
    "MemoryBroker",
    "MqttTransport",
    "Received",
    "Transport",
    "Will",
]
