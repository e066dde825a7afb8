"""Prompts of many kinds and lengths, plain and chat."""

from __future__ import annotations

from pathlib import Path

SHORT = [
    "The",
    "1, 2, 3, 4,",
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "La montagne était couverte de neige et",
    "Der Sessellift fährt ohne",
    "北京是中国的",
    "Привет! Меня зовут",
    "Emoji test: 🚡🎿❄️ and then",
    '{"name": "Ada", "year": 1815, "fields": [',
    "Q: How many legs does a spider have?\nA:",
    "import numpy as np\n\nclass Matrix:\n    def __init__(self",
    "   leading spaces and\ttabs\n\n\nnewlines",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "3.14159265358979323846264338327950288",
    "To be, or not to be, that is the question:",
    "<html><body><h1>",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy",
]

CHATS = [
    "What is continuous batching?",
    "Write a haiku about snow.",
    "Translate 'good morning' into Spanish.",
    "Give me three facts about the Alps, as a list.",
    "What is 17 times 23? Think step by step.",
    "Why is the sky blue?",
    "Summarise this: a chairlift never stops for boarding; riders step on and off while it moves.",
    "Name a prime number above 100.",
]


def long_text() -> str:
    """Return some thousand words of English: the licence of this project."""
    return (Path(__file__).parent.parent / "LICENSE").read_text()
