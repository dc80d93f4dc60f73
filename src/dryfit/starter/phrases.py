"""The wording of the synthetic posts: criteria, phrases for and against them, and sentence frames.

A *phrase* is a verb phrase of the first person, ``VERB REST``; :data:`VERBS` has the verb's other forms. Every
criterion has phrases that show it and phrases of its opposite, so that one sentence frame turns either into its
contrary and no word gives the label away.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Criterion:
    """A statement about the writer.

    Attributes:
        text: The criterion as the data set states it.
        shows: Phrases that make it true of their subject.
        opposes: Phrases that make it untrue of their subject.
    """

    text: str
    shows: tuple[str, ...]
    opposes: tuple[str, ...]


CRITERIA: tuple[Criterion, ...] = (
    Criterion(
        "The writer sleeps badly.",
        (
            "sleep badly",
            "lie awake for hours",
            "wake up long before the alarm",
            "toss and turn all night",
            "get far too little sleep",
            "need half the night to doze off",
        ),
        (
            "sleep soundly",
            "fall asleep at once",
            "sleep right through until the alarm",
            "get a full night of rest",
            "wake up well rested",
            "doze off without any trouble",
        ),
    ),
    Criterion(
        "The writer is in a low mood.",
        (
            "feel down",
            "feel sad for most of the day",
            "cry over small things",
            "see everything in grey",
            "feel gloomy from morning to evening",
            "go around with a heavy heart",
        ),
        (
            "feel cheerful",
            "laugh a lot",
            "feel happy for most of the day",
            "see the bright side of everything",
            "go around with a smile",
            "feel in good spirits from morning to evening",
        ),
    ),
    Criterion(
        "The writer has little appetite.",
        (
            "leave most of the dinner on the plate",
            "skip meals without noticing",
            "eat next to nothing",
            "feel no hunger at all",
            "pick at the food",
            "find every dish unappealing",
        ),
        (
            "eat with pleasure",
            "finish every plate",
            "feel hungry well before lunch",
            "take a second helping",
            "look forward to every meal",
            "find every dish delicious",
        ),
    ),
    Criterion(
        "The writer worries a lot.",
        (
            "worry about everything",
            "expect the worst of every letter",
            "fret over the future",
            "feel nervous before every phone call",
            "go through all that could go wrong",
            "feel uneasy for hours",
        ),
        (
            "take things calmly",
            "feel at ease about the future",
            "trust that things will work out",
            "feel relaxed before every phone call",
            "open every letter without a second thought",
            "stay calm for hours",
        ),
    ),
    Criterion(
        "The writer lacks energy.",
        (
            "feel tired all day",
            "run out of steam by noon",
            "drag through the day",
            "feel worn out after a short walk",
            "need a break after every small task",
            "get off the sofa only with great effort",
        ),
        (
            "feel full of energy",
            "go strong until the evening",
            "run up the stairs",
            "feel fresh after a long walk",
            "get through every task with ease",
            "bounce off the sofa",
        ),
    ),
    Criterion(
        "The writer has trouble concentrating.",
        (
            "lose the thread after a page",
            "read every line twice",
            "drift off in every meeting",
            "forget what a sentence was about",
            "get distracted by every noise",
            "find it hard to follow a film",
        ),
        (
            "stay focused on a book",
            "follow every meeting to the end",
            "read whole chapters in one go",
            "concentrate without effort",
            "work on one thing for hours",
            "find it easy to follow a film",
        ),
    ),
)

VERBS: dict[str, tuple[str, str]] = {
    "bounce": ("bounces", "bounced"),
    "concentrate": ("concentrates", "concentrated"),
    "cry": ("cries", "cried"),
    "doze": ("dozes", "dozed"),
    "drag": ("drags", "dragged"),
    "drift": ("drifts", "drifted"),
    "eat": ("eats", "ate"),
    "expect": ("expects", "expected"),
    "fall": ("falls", "fell"),
    "feel": ("feels", "felt"),
    "find": ("finds", "found"),
    "finish": ("finishes", "finished"),
    "follow": ("follows", "followed"),
    "forget": ("forgets", "forgot"),
    "fret": ("frets", "fretted"),
    "get": ("gets", "got"),
    "go": ("goes", "went"),
    "laugh": ("laughs", "laughed"),
    "leave": ("leaves", "left"),
    "lie": ("lies", "lay"),
    "look": ("looks", "looked"),
    "lose": ("loses", "lost"),
    "need": ("needs", "needed"),
    "open": ("opens", "opened"),
    "pick": ("picks", "picked"),
    "read": ("reads", "read"),
    "run": ("runs", "ran"),
    "see": ("sees", "saw"),
    "skip": ("skips", "skipped"),
    "sleep": ("sleeps", "slept"),
    "stay": ("stays", "stayed"),
    "take": ("takes", "took"),
    "toss": ("tosses", "tossed"),
    "trust": ("trusts", "trusted"),
    "wake": ("wakes", "woke"),
    "work": ("works", "worked"),
    "worry": ("worries", "worried"),
}
"""Third person and past of every verb that opens a phrase."""

# In the frames {base}, {third} and {past} are forms of a phrase, {who} is somebody else, {now} and {then} are times.

AFFIRMING: tuple[str, ...] = (
    "{Now} I {base}.",
    "{Now} I seem to {base}.",
    "I have to admit that I {base} {now}.",
    "I am someone who tends to {base} {now}.",
    "{Who} has seen me {base} {now}.",
    "If you ask {who}, I {base} {now}.",
)
"""The phrase is true of the writer, now."""

REVERSING: tuple[str, ...] = (
    "{Now} I do not {base}.",
    "I no longer {base}.",
    "I used to {base}, but that is over.",
    "{Then} I {past}, but not any more.",
    "It is not the case that I {base} {now}.",
    "Nobody could say that I {base} {now}.",
    "Unlike {who}, who {third}, I do not.",
    "{Who} {third} {now}, but I do not.",
)
"""The phrase is not true of the writer, now: a phrase that opposes a criterion thereby shows it."""

ABOUT_OTHERS: tuple[str, ...] = (
    "{Now} {who} seems to {base}.",
    "{Who} {third} {now}.",
    "I have to admit that {who} seems to {base} {now}.",
    "{Who} is someone who tends to {base} {now}.",
    "I have seen {who} {base} {now}.",
    "If you ask me, {who} must {base} {now}.",
)
"""The phrase is true of somebody else; nothing is said of the writer."""

NOW: tuple[str, ...] = ("these days", "at the moment", "this week", "most days", "lately", "at present", "right now")

THEN: tuple[str, ...] = ("last year", "as a student", "in the spring", "before the move", "a year ago", "back then")

PEOPLE: tuple[str, ...] = (
    "my sister",
    "my brother",
    "my neighbour",
    "my flatmate",
    "my father",
    "my mother",
    "a friend of mine",
    "my cousin",
    "my colleague",
)

FILLERS: tuple[str, ...] = (
    "The new bakery on the corner opens at seven.",
    "We painted the kitchen in a pale green.",
    "The bus was late again on Monday.",
    "I am learning to play the guitar.",
    "Our dog chases every cat in the street.",
    "The library has moved to the old mill.",
    "I planted tomatoes on the balcony.",
    "There is a market here every Saturday.",
    "The train ride to the coast takes two hours.",
    "I bought a second-hand bicycle.",
    "The neighbours are building a shed.",
    "It has been raining since Tuesday.",
    "We are planning a trip to the mountains.",
    "My desk is by the window now.",
    "The choir is looking for a new tenor.",
    "I have started to bake my own bread.",
)
