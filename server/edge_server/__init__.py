"""The server side: the run as a state machine, selection, aggregation, durable state."""

from edge_server.config import RunConfig
from edge_server.evaluation import Evaluation
from edge_server.rounds import RoundResult
from edge_server.server import Outcome, Server

__all__ = ["Evaluation", "Outcome", "RoundResult", "RunConfig", "Server"]
