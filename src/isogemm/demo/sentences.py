"""The demo's own sentences: pairs that say one thing in two ways, short and long ones mixed."""

from __future__ import annotations

# Sentences 2i and 2i+1 are paraphrases, so a working encoder finds one from the other.
SENTENCES = (
    "The train to Lyon leaves at half past six in the morning.",
    "At 6:30 a.m. the Lyon train departs.",
    "How do I reset the password of my account?",
    "I forgot my login and need a new password.",
    "Heavy rain flooded the streets of the old town last night, and several families had to leave their homes.",
    "Overnight storms put the historic centre under water and forced residents to evacuate.",
    "Add two cups of flour, a pinch of salt and three eggs, then stir until the dough is smooth.",
    "Mix flour, salt and eggs into an even dough.",
    "The committee postponed its decision on the new bridge until spring.",
    "No ruling on the bridge is expected before next spring, the board said.",
    "Cats sleep most of the day.",
    "A cat spends the greater part of its time asleep.",
    "The central bank raised interest rates by a quarter of a percentage point to slow inflation.",
    "To fight rising prices, borrowing costs were increased by 25 basis points.",
    "She has played the violin since she was five years old.",
    "Her first violin lesson was at the age of five.",
    "The telescope photographed a galaxy whose light left it thirteen billion years ago, when the universe was young.",
    "Astronomers imaged one of the most distant galaxies ever seen.",
    "My phone's battery is empty after two hours.",
    "The mobile needs charging again, it barely lasts until noon.",
    "The patient was given antibiotics for a bacterial infection of the lungs and recovered within ten days.",
    "Pneumonia was treated with antibiotics.",
    "The goalkeeper saved a penalty in the last minute of the final.",
    "A late penalty stop decided the championship match.",
)
