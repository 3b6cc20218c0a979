"""Questions the model cannot answer, and the one honest sentence it gives instead; greetings; invented functions.

Knows wording only. Off-topic questions are templates filled from lists, so a held-out set (other wording, other topics)
tests whether refusing generalises.
"""

from __future__ import annotations

import random

from .chat import ask

REFUSAL = "I cannot help with that: I am a tiny demo model that only describes common Python functions and makes small code edits."
ABOUT = (
    "I am the demo model of mlxspec, a very small model trained on Python's standard library: "
    "ask me what a common function does, or paste a function to rename, edit, explain or continue."
)
_SLOTS = {
    "country": "France Germany Japan Brazil Canada Egypt India Norway Peru Kenya Spain Italy Greece China Poland Chile Cuba",
    "city": "Paris London Tokyo Berlin Rome Madrid Oslo Cairo Lima Sydney Moscow Delhi Boston Vienna Prague Dublin",
    "person": "Einstein Napoleon Shakespeare Mozart Cleopatra Newton Darwin Picasso Gandhi Lincoln Beethoven Tesla Plato",
    "topic": "love autumn cats dogs the_sea the_moon war peace winter rain mountains coffee friendship time music summer",
    "food": "pasta rice soup bread pancakes pizza sushi curry an_omelette a_cake chicken fish salad cookies tea potatoes",
    "thing": "a_car a_house a_phone a_bicycle a_laptop a_boat shoes a_guitar a_camera a_watch a_sofa a_ticket insurance",
    "animal": "a_lion a_whale an_elephant a_horse a_cat a_bear a_frog an_eagle a_shark a_snake a_spider a_wolf",
    "language": "French German Spanish Japanese Latin Italian Chinese Russian Dutch Polish Greek",
    "word": "hello goodbye house water tree friend thanks morning night bread sun river",
    "science": "gravity photosynthesis evolution black_holes electricity magnetism DNA atoms earthquakes rainbows vaccines",
    "sport": "football tennis chess golf basketball swimming cricket boxing hockey baseball rugby",
    "field": "history physics biology economics politics philosophy chemistry art religion medicine law geography",
    "event": "the_world_cup the_election the_war the_olympics the_race the_match the_championship",
    "software": "Java Rust Excel Windows Photoshop Kubernetes Docker React Linux SQL JavaScript Haskell Word Android",
    "feeling": "sad happy tired bored lonely angry sick nervous hungry stressed",
    "work": "a_poem a_story a_song an_essay a_letter a_speech a_joke a_recipe a_novel a_limerick a_haiku an_email",
}
_TEMPLATES = """what is the capital of {country}|where is {country}|how big is {country}|who is the president of {country}
what language do they speak in {country}|tell me about {country}|tell me about {city}|what is the weather in {city}
how far is it from {city} to {city}|what should I see in {city}|how many people live in {city}|is it raining in {city}
who was {person}|when was {person} born|what did {person} do|tell me about {person}|where did {person} live
write {work} about {topic}|write me {work}|can you write {work} about {person}|compose {work} on {topic}|{work} please
write {work} about {animal}|I need {work} for my boss|tell me {work}|tell me a joke about {topic}|sing a song about {topic}
how do I cook {food}|give me a recipe for {food}|what can I eat with {food}|how long does {food} take|I want {food}
where can I buy {thing}|how much is {thing}|which {thing} should I buy|how do I repair {thing}|I want to sell {thing}
what does {animal} eat|how fast is {animal}|how old can {animal} get|where does {animal} live|draw {animal}
translate {word} to {language}|how do you say {word} in {language}|what is {word} in {language}|speak {language}
do you speak {language}|teach me {language}|explain {science}|what is {science}|how does {science} work|why is there {science}
who discovered {science}|what are the rules of {sport}|who won {event}|when is {event}|who will win {event}
who is the best at {sport}|how do I get better at {sport}|what do you know about {field}|explain {field} to me
I have a question about {field}|give me advice on {field}|what is the most important thing in {field}
what is {n} plus {n}|what is {n} times {n}|calculate {n} / {n}|how much is {n} + {n}|what is the square root of {n}
is {n} a prime number|count to {n}|what happened in {year}|what year is it|what is the date today|what time is it
what day is it|how are you feeling|I am {feeling}|I feel {feeling} today|why am I so {feeling}|what should I do when I am {feeling}
what is the meaning of life|do you love me|are you alive|are you conscious|do you dream|how old are you|where do you live
what is your favourite colour|what is your favourite {sport} team|do you like {food}|do you like {topic}|are you human
how do I install {software}|write a program in {software}|what is {software}|is {software} better than Python|teach me {software}
how do I learn {software}|explain {software}|what is the latest version of {software}|fix my {software}|how much does {software} cost
book a flight to {city}|find me a hotel in {city}|play some music|set an alarm for {n}|call my mother|send an email to {person}
what is in the news|what are the news from {country}|who is the richest person in the world|how tall is the highest mountain
how many planets are there|how far away is the moon|what is the speed of light|why is the sky blue|how deep is the ocean
can you help me with my taxes|should I invest in {thing}|what is the price of gold|how do I lose weight|is {food} healthy
I have a headache|what medicine should I take|how do I become rich|give me a name for my {pet}|what should I wear today
recommend a book|recommend a film about {topic}|what is a good book about {field}|who wrote the book about {topic}
summarize the history of {country}|compare {country} and {country}|compare {food} and {food}|who is older, {person} or {person}
plan a trip to {country}|how do I get to {city}|is {city} in {country}|what is the best restaurant in {city}
are you better than other models|can you see pictures|can you browse the internet|search the web for {topic}|open the door
what do you think about {topic}|what is your opinion on {event}|do you believe in {science}|tell me something about {topic}
build a website|make an app for {topic}|hack into a computer|write malware|what is my name|who am I|what did I say yesterday
lorem ipsum|asdf|qwerty|blah blah|{word} {word} {word}|{n}|why|what|how|really|no|yes|maybe|ok|hmm|because|I see""".replace(
    "\n", "|"
).split("|")
HELD_OUT = (
    "Who painted the ceiling of the Sistine Chapel?",
    "what is the boiling point of mercury",
    "How do I change a flat tire?",
    "Give me three ideas for a birthday present",
    "which river flows through Budapest?",
    "Write a limerick about a clumsy robot",
    "should I break up with my girlfriend?",
    "how many calories are in an apple",
    "Who is the king of Sweden?",
    "What's the best way to learn the violin?",
    "translate 'good evening' into Portuguese",
    "solve 3x + 5 = 20",
    "what's the plot of Hamlet?",
    "my cat is ill, what can I do",
    "tell me a bedtime story",
    "How long does it take to fly to Mars?",
    "what stocks will go up tomorrow?",
    "Are there any good restaurants nearby?",
    "how do I train for a marathon?",
    "When did the Roman Empire fall?",
)
_GREETINGS = """hi|hello|hey|hi there|hello there|good morning|good evening|hey you|hello!|hi!|yo|greetings|who are you|what are you
what can you do|help|what is this|who made you|what is your name|how can you help me|what do you know|are you an AI|are you a model
what is mlxspec|introduce yourself|what model are you|which model is this|tell me about yourself|how big are you|start""".replace(
    "\n", "|"
).split("|")
_THANKS = "thanks|thank you|thanks!|thank you very much|great|great, thanks|perfect|nice|cool|bye|goodbye|ok thanks|awesome".split(
    "|"
)
_INVENTED_STEMS = "frob quux blor zint snarf wibble grok flum dax vorp mung plugh krel tarn yolk spoo gleep narf zorch".split()
_INVENTED_TAILS = "nicate ify ulate sort map all state _list _str path ize _now load ()".split()


def off_topic_question(rnd: random.Random) -> str:
    """A question outside what the model knows."""
    text = rnd.choice(_TEMPLATES)
    for slot, words in _SLOTS.items():
        while "{" + slot + "}" in text:
            text = text.replace("{" + slot + "}", rnd.choice(words.split()).replace("_", " "), 1)
    while "{n}" in text:
        text = text.replace("{n}", str(rnd.randrange(1, 200)), 1)
    text = text.replace("{year}", str(rnd.randrange(1500, 2025))).replace(
        "{pet}", rnd.choice(["dog", "cat", "band", "boat"])
    )
    lead = rnd.choice(
        ["", "", "", "", "", "please ", "hey, ", "ok, ", "can you tell me ", "tell me, ", "I wonder, ", "so "]
    )
    text = lead + text + rnd.choice(["", "", "?", "?", "?", ".", "!", " please", ", please"])
    return text[0].upper() + text[1:] if rnd.random() < 0.45 else text


def refusal_chat(rnd: random.Random) -> str:
    return ask(off_topic_question(rnd), REFUSAL)


def invented_chat(rnd: random.Random) -> str:
    """A function that does not exist, in a wording that is otherwise a good question."""
    name = rnd.choice(_INVENTED_STEMS) + rnd.choice(_INVENTED_TAILS)
    module = rnd.choice(["", "", "math.", "os.", "str.", "list.", "itertools.", "json.", "foo.", "acme."])
    form = rnd.choice(
        ["what does {} do?", "what is {}?", "explain {}", "How do I use {}?", "{}", "tell me about {}"]
    )
    return ask(
        form.format(module + name),
        "I do not know that function: I only know common functions of Python's library.",
    )


def greeting_chat(rnd: random.Random) -> str:
    if rnd.random() < 0.3:
        return ask(rnd.choice(_THANKS), "You are welcome.")
    text = rnd.choice(_GREETINGS) + rnd.choice(["", "", "?", ".", "!"])
    return ask(text[0].upper() + text[1:] if rnd.random() < 0.4 else text, ABOUT)
