"""Twenty short prompts of our own: facts, stories, code, lists, other languages."""

from __future__ import annotations

PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "def fibonacci(n):\n    ",
    "List three fruits and their colours.",
    "The train left the station at noon, and",
    "Explain why the sky is blue in one sentence.",
    "Once upon a time there was a clockmaker who",
    "Translate to French: good morning, my friend.",
    "How many legs does a spider have?",
    "import numpy as np\n\n# compute the mean of each row\n",
    "Give me two tips for sleeping well.",
    "The three primary colours are",
    "Repeat after me: one two three one two three one two",
    "What is 17 plus 25?",
    "Dear Sir or Madam,\n\nI am writing to",
    "Who wrote Romeo and Juliet?",
    "A recipe for pancakes:\n1.",
    "Summarise: The meeting was moved from Monday to Thursday because of the storm.",
    "El perro corre por el parque y",
    "SELECT name, age FROM users WHERE",
)
