"""What to ask a chat model so that it talks about many things."""

from __future__ import annotations

import random

QUESTIONS = (
    "What is {}?",
    "Explain {} to a child.",
    "Tell me about {}.",
    "Give me five facts about {}.",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Why is {} important?",
    "How does {} work?",
    "What are the advantages and disadvantages of {}?",
    "Write an email to a colleague about {}.",
    "List the steps to get started with {}.",
    "Summarise what is known about {} in three sentences.",
    "Write a Python function that has to do with {}.",
    "Make a table about {}.",
    "What is the history of {}?",
    "What questions would you ask an expert on {}?",
    "Compare {} with something similar.",
    "Plan a lesson about {}.",
    "Give me advice on {}.",
    "Write a dialogue between two people about {}.",
    "I know nothing about {}. Where should I begin?",
    "What do most people get wrong about {}?",
    "Write a short speech on {}.",
    "How has {} changed over the last hundred years?",
    "What would the world be like without {}?",
    "Is {} worth the trouble? Argue for both sides.",
    "Write a diary entry of someone who cares about {}.",
    "Who are the people to know about when it comes to {}?",
    "Can you recommend something to read or to watch about {}?",
    "What does {} have to do with everyday life?",
    "Write a review of a book about {}.",
    "Make up a riddle about {} and then solve it.",
    "How do I talk about {} with my grandmother?",
    "What could go wrong with {}, and what would you do then?",
    "Write the opening of a novel in which {} matters.",
    "Ask me three questions about {} and answer them yourself.",
    "What feelings do people connect with {}?",
    "Explain {} with an everyday comparison.",
    "Give me a checklist for {}.",
    "Which numbers should one remember about {}?",
)
SUBJECTS = (
    "photosynthesis", "the French Revolution", "black holes", "machine learning", "sourdough bread", "the stock market",
    "volcanoes", "the human heart", "jazz music", "electric cars", "democracy", "dinosaurs", "the Roman Empire",
    "healthy eating", "sorting a list", "the water cycle", "chess", "job interviews", "gardening", "climate change",
    "quantum computers", "the ocean", "time management", "ancient Egypt", "vaccines", "bicycles", "poetry",
    "renewable energy", "learning a language", "the moon", "cats", "databases", "marathon running", "coffee",
    "the Renaissance", "bees", "recursion", "public speaking", "mountains", "the internet", "photography", "sleep",
    "artificial intelligence", "painting", "gravity", "budgeting", "penguins", "the Silk Road", "yoga", "prime numbers",
    "trains", "friendship", "recycling", "the piano", "earthquakes", "football", "tea", "architecture", "memory",
    "bridges", "wolves", "travelling to Japan", "web pages", "fractions", "the Olympic Games", "honesty", "robots",
    "markets", "shadows", "rivers", "old maps", "handwriting", "neighbours", "the desert", "islands", "probability",
    "museums", "homework", "the violin", "courage", "winter", "insects", "electricity", "fairy tales", "hiking",
    "first aid", "grammar", "the brain", "theatre", "fishing", "glass", "patience", "steam engines", "birds", "salt",
    "small talk", "village life", "apples", "crime novels", "moving house", "satellites", "knitting", "elections",
    "the Amazon rainforest", "word games", "storms", "cooking pasta", "genes", "libraries", "space travel", "dogs",
)  # fmt: skip


def questions(count: int, chance: random.Random) -> list[str]:
    """So many different ones, or as many as there are, again and again."""
    every = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS]
    chance.shuffle(every)
    return [every[index % len(every)] for index in range(count)]
