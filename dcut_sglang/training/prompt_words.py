"""The words that fill the prompt templates, and the prompts outside of every template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """What fills the slots; `topic` prompts draw from other words than all others."""

    things: tuple[str, ...]
    attributes: tuple[str, ...]
    names: tuple[str, ...]
    cities: tuple[str, ...]
    tasks: tuple[str, ...]
    subjects: tuple[str, ...]
    activities: tuple[str, ...]


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";"))


_ATTRIBUTES = _split(
    "name; age; color; price; size; weight; height; title; author; year; email; phone; address;"
    "city; status; category; rating; quantity; speed; model; brand; owner; date; location;"
    "description; level; score; type; length; width"
)
TRAIN_WORDS = Words(
    things=_split(
        "Car; Dog; Book; Student; Teacher; Employee; Customer; Product; Order; Invoice; Movie;"
        "Song; Player; Team; House; Room; Flight; Ticket; City; Country; Recipe; Event; Task;"
        "Message; Account; Course; Device; Sensor; Robot; Planet; Star; Tree; Flower; Bird; Fish;"
        "Phone; Laptop; Camera; Bike; Truck; Lake; River; Tower; Hotel; Table; Chair; Window;"
        "Engine; Lamp; Clock; Painting; Concert; Doctor; Patient; Farmer; Market; Bakery; School"
    ),
    attributes=_ATTRIBUTES,
    names=_split(
        "Alice; Bob; Carol; David; Emma; Frank; Grace; Henry; Ivy; Jack; Kate; Liam; Mia; Noah;"
        "Olivia; Peter; Quinn; Rose; Sam; Tina; Anna; Bruno; Clara; Diego; Elena; Felix; Greta;"
        "Hugo; Irene; Jonas; Karin; Lucas; Maria; Nils; Otto; Paula; Ralf; Sofia; Theo; Vera"
    ),
    cities=_split(
        "Paris; London; Berlin; Madrid; Rome; Tokyo; Cairo; Lima; Oslo; Dublin; Boston; Chicago;"
        "Denver; Geneva; Hamburg; Kyoto; Lyon; Milan; Munich; Naples; Porto; Seoul; Sydney; Turin"
    ),
    tasks=_split(
        "adds two numbers; subtracts two numbers; multiplies two numbers; divides two numbers;"
        "returns the larger of two numbers; returns the smaller of two numbers;"
        "returns the square of a number; returns the cube of a number;"
        "returns the absolute value of a number; checks if a number is even;"
        "checks if a number is odd; checks if a number is positive; checks if a number is negative;"
        "returns the length of a string; returns a string in upper case;"
        "returns a string in lower case; reverses a string; returns the first element of a list;"
        "returns the last element of a list; returns the sum of a list;"
        "returns the largest number in a list; returns the smallest number in a list;"
        "returns the average of a list; counts the elements of a list; sorts a list;"
        "checks if a number is zero; returns the double of a number; returns half of a number;"
        "returns the remainder of two numbers; checks if a string is empty;"
        "checks if a list is empty; concatenates two strings;"
        "returns the first character of a string; returns the last character of a string;"
        "adds an element to a list; removes an element from a list;"
        "converts a string to an integer; converts an integer to a string;"
        "computes the area of a square; computes the area of a rectangle;"
        "computes the perimeter of a square; computes the volume of a cube;"
        "checks if two numbers are equal; swaps two numbers; prints a number;"
        "computes the factorial of a number; computes the average of three numbers;"
        "counts the vowels in a string; removes all spaces from a string;"
        "computes the area of a circle; converts Celsius to Fahrenheit;"
        "converts meters to kilometers; checks if a year is a leap year;"
        "checks if a string is a palindrome; reverses a list; returns the sum of three numbers;"
        "returns the difference of two numbers; checks if a list contains a number;"
        "returns the number of words in a sentence; repeats a string three times;"
        "returns the larger of two strings; prints all elements of a list;"
        "computes the sum of the numbers from 1 to n; checks if a number is prime;"
        "returns the power of a number; computes the perimeter of a rectangle;"
        "converts minutes to seconds; removes duplicates from a list; joins a list of strings;"
        "splits a sentence into words; replaces a character in a string; merges two lists;"
        "adds {n} to a number; multiplies a number by {n}; subtracts {n} from a number;"
        "checks if a number is divisible by {n}; checks if a number is greater than {n};"
        "checks if a number is less than {n}; repeats a string {n} times;"
        "returns the first {n} elements of a list; returns the last {n} elements of a list;"
        "checks if a string has more than {n} characters; prints a line {n} times;"
        "returns a list of {n} random numbers; counts the numbers above {n} in a list;"
        "prints the numbers from 1 to {n}; returns the sum of the first {n} numbers"
    ),
    subjects=_split(
        "photosynthesis; gravity; a volcano; a black hole; evolution; electricity; a magnet;"
        "an atom; climate change; solar energy; a desert; a whale; an ant; a penguin; a dinosaur;"
        "ancient Egypt; democracy; inflation; a bank; machine learning; a database; the internet;"
        "encryption; a robot; an airplane; a rocket; a telescope; jazz; chess; yoga; a vitamin;"
        "cheese; coffee; a mushroom; a river; an island; a hurricane; algebra; a fraction;"
        "psychology; a vaccine; the brain; Mars; the Moon; a comet; a compiler; a poem;"
        "the water cycle; the immune system; sound; a solar panel; a wind turbine; a rainforest;"
        "a coral reef; a dolphin; a shark; an elephant; a honey bee; a butterfly; an owl; a horse;"
        "the Roman Empire; the printing press; the Silk Road; the stock market; a tax; insurance;"
        "a neural network; an operating system; a computer virus; cloud computing; a linked list;"
        "a hash table; recursion; binary search; unit testing; HTML; JavaScript; Python; Linux;"
        "a drone; a bicycle; an electric car; a satellite; a microscope; a camera; the radio;"
        "a newspaper; a novel; sculpture; the piano; dance; theater; football; tennis; swimming;"
        "meditation; sleep; protein; bread; chocolate; tea; rice; gardening; a forest; a mountain;"
        "the weather; a cloud; snow; a calendar; a map; geometry; statistics; a prime number;"
        "memory; friendship; a hospital; an antibiotic; the lungs; a bone; a muscle; the eye;"
        "Jupiter; the Sun; a star; a galaxy; an asteroid; a mortgage; a passport; a contract"
    ),
    activities=_split(
        "learning to cook; learning a new language; saving money; studying for an exam;"
        "writing an essay; giving a speech; starting a business; running a marathon;"
        "reducing stress; making new friends; raising a puppy; growing tomatoes; painting a room;"
        "packing for a trip; buying a used car; learning to drive; playing the piano;"
        "taking better photos; managing time; working from home; reading more books;"
        "eating healthy; improving memory; cleaning the kitchen"
    ),
)
TOPIC_WORDS = Words(
    things=_split(
        "Museum; Bridge; Guitar; Train; Garden; Battery; Airport; Library; Kitchen; Ship; Castle;"
        "Ferry; Violin; Harbor; Balloon; Blanket"
    ),
    attributes=_ATTRIBUTES,
    names=_split(
        "Ursula; Victor; Wendy; Xavier; Yara; Zoe; Hannah; Oscar; Leonard; Matilda; Rupert; Sibyl"
    ),
    cities=_split("Helsinki; Sofia; Vienna; Athens; Warsaw; Prague; Tallinn; Zagreb; Bergen"),
    tasks=_split(
        "returns the smallest of three numbers; multiplies all numbers in a list;"
        "returns a string without its last character; checks if a number is a multiple of five;"
        "returns the middle element of a list; counts the commas in a string;"
        "computes the area of a triangle; converts hours to minutes"
    ),
    subjects=_split("a rainbow; a glacier; a violin; the Renaissance; a beehive; a lighthouse"),
    activities=_split(
        "a good night's sleep; building a birdhouse; visiting a castle; learning to juggle"
    ),
)
OUTSIDE = (
    "Write a haiku about the sea.",
    "Tell me a joke about a programmer.",
    "Write a story about a dragon who is afraid of fire.",
    "Translate 'Good morning, my friend' into Spanish.",
    "Who was Albert Einstein?",
    "Compare Java and C++.",
    "Describe a sunset over the city.",
    "Write a bash command that lists all files larger than 1 MB.",
    "Rewrite this sentence formally: gonna be late, sorry!",
    "Give me a recipe for pancakes.",
    "Write a Rust function that adds two numbers.",
    "My computer is slow. What can I do?",
    "Suggest a name for a small bakery and explain why.",
    "Write a regular expression that matches a date.",
    "Write a Dockerfile for a small Python program.",
    "What is 17 times 23? Show your work.",
    "Write a product description for a wooden chair.",
    "Write a HTML form with a field for the name.",
    "Write a YAML file with three settings of a game.",
    "Write a unit test in Python for a function that adds two numbers.",
)
