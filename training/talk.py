"""Small talk, questions about Proa, unknown subjects, names to remember, and copying words into JSON."""

import json
from random import Random

from training.turns import Fields, Turn
from training.world import COUNTRIES, NAMES, words

ABOUT = (
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself."),
     "I am the built-in model of Proa, a very small language model that was trained on a closed world of facts."),
    (("What is Proa?", "Tell me about Proa.", "What does Proa do?", "Explain Proa."),
     "Proa serves large language models on Kubernetes. It has a gateway that speaks HTTP and an engine that runs the "
     "model."),
    (("Why is it called Proa?", "Where does the name Proa come from?", "What is a proa?"),
     "A proa is a boat with two unlike hulls. In Proa the slim hull is the gateway and the main hull is the engine."),
    (("What does the gateway do?", "What is the gateway?", "Explain the gateway."),
     "The gateway takes HTTP requests, turns text into tokens, chooses an engine and streams the answer back."),
    (("What does the engine do?", "What is the engine?", "Explain the engine."),
     "The engine plans the work of each step, keeps the KV cache and runs the model to make the next tokens."),
    (("What is a KV cache?", "What is the KV cache?", "Explain the KV cache.", "What does the KV cache do?"),
     "The KV cache keeps the keys and values of earlier tokens, so that the model does not compute them again."),
    (("What does the scheduler do?", "What is the scheduler?", "Explain the scheduler."),
     "The scheduler decides how many tokens each request computes in the next step, so that many requests share the "
     "model."),
    (("What is a token?", "What are tokens?", "Explain what a token is."),
     "A token is a short piece of text, such as a word, a part of a word or a digit. A model reads and writes tokens."),
    (("What is Kubernetes?", "Explain Kubernetes."),
     "Kubernetes runs programs in containers on many machines and keeps them alive."),
    (("What is Helm?", "What is the Helm chart?", "How do I install Proa?"),
     "Helm installs programs on Kubernetes. Proa comes with a Helm chart, so one command installs the gateway and the "
     "engine."),
    (("What is streaming?", "How does streaming work?"),
     "Streaming sends each piece of the answer as soon as it is made, so you can read it while the model still "
     "writes."),
    (("What can you do?", "How can you help me?", "What do you know?", "What can I ask you?", "Help!", "help"),
     "I can answer questions about countries, animals, planets and the calendar, do small sums, count, tell short "
     "stories and answer in JSON."),
    (("How large are you?", "How big are you?", "How many parameters do you have?"),
     "I am very small. I have a few million parameters, and my file is smaller than 16 megabytes."),
    (("Who made you?", "Who trained you?", "How were you trained?"),
     "I was trained by a script in the Proa repository, on text that the script writes itself."),
    (("Are you a human?", "Are you a person?", "Are you a robot?", "Are you real?"),
     "No, I am not a person. I am a small language model."),
)  # fmt: skip

SMALL_TALK = (
    (("Hello!", "Hello", "Hi", "Hi!", "Hey", "Hello there!", "Good day!", "Greetings!"), "Hello! How can I help you?"),
    (("Good morning!", "Good morning"), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening"), "Good evening! How can I help you?"),
    (("How are you?", "How are you today?", "How do you do?", "How is it going?"),
     "I am fine, thank you. What would you like to know?"),
    (("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much.", "thanks"), "You are welcome!"),
    (("Goodbye!", "Bye!", "See you later!", "Good night!", "bye"), "Goodbye! It was nice to talk with you."),
    (("Well done!", "Great!", "Very good!", "Nice!", "Cool!", "That is right."),
     "Thank you! What else would you like to know?"),
    (("Are you sure?", "Is that true?", "Really?"), "Yes, I think so. But I am a very small model and can be wrong."),
    (("I am sad.", "I feel sad.", "I am sad today."), "I am sorry to hear that. Would you like to hear a story?"),
    (("I am happy.", "I feel great!", "I am happy today."), "That is good to hear! What would you like to do?"),
    (("I am bored.", "This is boring."), "Then ask me for a story, or try me with a sum."),
    (("Yes", "Yes, please.", "Ok", "Okay", "Sure"), "Good. What would you like to know?"),
    (("No", "No, thank you.", "Nothing."), "All right. I am here if you need me."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
     "Why did the duck cross the road? It wanted to see how the chicken did it."),
    (("Say hello.", "Say hi."), "Hello!"),
    (("Test", "test", "This is a test."), "The test works. I am here."),
)  # fmt: skip

REFUSAL = (
    "I am sorry, I do not know that. I am a small model and only know about countries, animals, planets, the calendar, "
    "simple words and small sums."
)
_STRANGE = (
    "Who won the {} in {}?", "Write a {} in Python.", "How do I cook {}?", "What is the weather in {}?",
    "Who wrote {}?",
    "What is the best {}?", "Explain {} to me.", "What do you think about {}?", "How much does a {} cost?",
    "Translate {} into French.", "Who is the president of {}?", "What is the meaning of {}?", "How does a {} work?",
    "Give me advice about {}.", "What is {}?", "Who invented the {}?", "How old is {}?", "Recommend a {}.",
    "What happened in {}?", "Why do people like {}?", "Summarize {}.", "When was {} born?", "How tall is {}?",
    "Write a poem about {}.", "Write an essay about {}.", "Who discovered {}?", "How do I repair a {}?",
)  # fmt: skip
_STRANGE_THINGS = (
    "football", "World Cup", "quantum physics", "rice", "love", "computer", "Shakespeare", "the stock market",
    "politics",
    "guitar", "movie", "software", "history", "chemistry", "bicycle", "pizza", "electricity", "music", "the internet",
    "telephone", "Napoleon", "Einstein", "restaurant", "bread", "medicine", "a black hole", "engine oil", "philosophy",
    "tennis", "video game", "blockchain", "gravity", "airplane", "soup", "religion", "democracy", "sorting algorithm",
    "war", "economics", "painting", "1998", "2010", "life", "time", "happiness", "my boss", "Harry Potter", "laptop",
    "coffee", "wine", "the moon landing", "dinosaurs", "evolution", "DNA", "a neural network", "tax", "insurance",
)  # fmt: skip
_OPENERS = (
    "Please tell me: ", "Quick question: ", "I have a question. ", "Can you help me? ", "Hi! ", "Hello. ", "Now: ",
)  # fmt: skip
_SYLLABLES = words("ba do ka lo mi ne po ra su ti vo zu gar len mon tar bel dor fin gul har kin")


def invented_name(rng: Random) -> str:
    """A made-up name."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()


def with_opener(rng: Random, question: str) -> str:
    """The question, one in ten after a few words of introduction."""
    return rng.choice(_OPENERS) + question if rng.random() < 0.1 else question


def about_proa(rng: Random) -> Turn:
    questions, answer = rng.choice(ABOUT)
    return Turn(rng.choice(questions), answer, {"answer": answer})


def small_talk(rng: Random) -> Turn:
    questions, answer = rng.choice(SMALL_TALK)
    return Turn(rng.choice(questions), answer)


def unknown_subject(rng: Random) -> Turn:
    if rng.random() < 0.3:
        name = invented_name(rng)
        question, answer = rng.choice((
            (f"What is the capital of {name}?", f"I am sorry, I do not know a country called {name}."),
            (f"On which continent is {name}?", f"I am sorry, I do not know a country called {name}."),
            (f"Which language is spoken in {name}?", f"I am sorry, I do not know a country called {name}."),
        ))  # fmt: skip
        return Turn(question, answer, {"answer": "unknown"})
    template = rng.choice(_STRANGE)
    things = rng.sample(_STRANGE_THINGS, 2)
    return Turn(template.format(*things), REFUSAL, {"answer": "unknown"})


def name_dialogue(rng: Random) -> list[Turn]:
    """The user gives a name (sometimes a made-up one) and asks for it later, or asks without having given one."""
    name = rng.choice((*NAMES, invented_name(rng), invented_name(rng)))
    ask = rng.choice(("What is my name?", "Do you remember my name?", "Who am I?", "What did I say my name was?"))
    if rng.random() < 0.15:
        return [Turn(ask, "You have not told me your name yet.")]
    tell = rng.choice((
        f"My name is {name}.", f"I am {name}.", f"Hello, my name is {name}.", f"Hi, I am {name}.", f"Call me {name}.",
    ))  # fmt: skip
    return [Turn(tell, f"Nice to meet you, {name}! How can I help you?"), Turn(ask, f"Your name is {name}.")]


def introduction(rng: Random) -> Turn:
    return name_dialogue(rng)[0]


def extraction(rng: Random) -> Turn:
    """Words and numbers of a sentence copied into a JSON object. These questions always ask for JSON."""
    name = rng.choice((*NAMES, invented_name(rng)))
    city, age = rng.choice((rng.choice(COUNTRIES).capital, invented_name(rng))), rng.randint(1, 99)
    fields: Fields = {"name": name, "age": age, "city": city}
    sentence, keys = rng.choice((
        (f"{name} is {age} years old and lives in {city}.", ("name", "age", "city")),
        (f"{name} lives in {city}.", ("name", "city")),
        (f"{name} is {age} years old.", ("name", "age")),
        (f"My friend {name} lives in {city} and is {age} years old.", ("name", "age", "city")),
    ))  # fmt: skip
    wanted = f"{', '.join(keys[:-1])} and {keys[-1]}"
    question = rng.choice((
        f"Extract the {wanted} as JSON: {sentence}", f"Give me the {wanted} in JSON. {sentence}",
        f"Turn this into JSON with {wanted}: {sentence}", f"{sentence} Answer in JSON with {wanted}.",
    ))  # fmt: skip
    return Turn(question, json.dumps({key: fields[key] for key in keys}))
