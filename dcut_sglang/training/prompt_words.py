"""The words that fill the prompt templates, and the prompts outside of every template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """What fills the slots; `topic` prompts draw from other words than all others.

    `more_subjects` are those of the kind "explain": added when the held-out prompts were fixed.
    """

    things: tuple[str, ...]
    attributes: tuple[str, ...]
    names: tuple[str, ...]
    cities: tuple[str, ...]
    tasks: tuple[str, ...]
    subjects: tuple[str, ...]
    activities: tuple[str, ...]
    more_subjects: tuple[str, ...] = ()


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";"))


_ATTRIBUTES = _split(
    "name; age; color; price; size; weight; height; title; author; year; email; phone; address;"
    "city; status; category; rating; quantity; speed; model; brand; owner; date; location;"
    "description; level; score; type; length; width"
)
_MORE_SUBJECTS = _split(
    "a canal; a dam; a subway; a tram; a truck; a submarine; a helicopter; a parachute; a "
    "kite; a sailboat; a canoe; a motorcycle; a tractor; a steam engine; a light bulb; a "
    "transistor; a microchip; a laser; a radar; a sensor; a thermometer; a barometer; a "
    "compass; a clock; a watch; a lens; a mirror; a prism; a pendulum; a lever; a pulley; a "
    "gear; a spring; a pump; a turbine; a furnace; an oven; a refrigerator; a washing "
    "machine; a vacuum cleaner; a sewing machine; a typewriter; a printer; a scanner; a "
    "keyboard; a touchscreen; a smartphone; a tablet; a laptop; a server; a router; a web "
    "browser; a search engine; an email; a password; a firewall; a spreadsheet; a text "
    "editor; a debugger; a programming language; a function; a variable; a loop; an array; a "
    "stack; a queue; a graph; a binary tree; sorting; dynamic programming; object-oriented "
    "programming; version control; an API; XML; CSS; Java; Rust; a container; a virtual "
    "machine; a data center; big data; data mining; deep learning; computer vision; speech "
    "recognition; a chatbot; artificial intelligence; blockchain; cryptography; quantum "
    "computing; virtual reality; a video game; animation; a podcast; a blog; social media; "
    "advertising; marketing; a brand; a company; a startup; a factory; a supply chain; a "
    "warehouse; a market; a shop; a restaurant; a hotel; a university; a school; a "
    "kindergarten; a laboratory; a prison; a court; a judge; a lawyer; a police officer; a "
    "firefighter; a nurse; a doctor; a dentist; a teacher; a farmer; a carpenter; an "
    "architect; an engineer; a journalist; a photographer; a parliament; an election; a "
    "constitution; a republic; a monarchy; human rights; citizenship; immigration; the United "
    "Nations; the European Union; the Cold War; World War I; World War II; the French "
    "Revolution; the American Civil War; the Industrial Revolution; the Middle Ages; the "
    "Stone Age; the Bronze Age; ancient Greece; ancient Rome; the Maya; the Inca; the "
    "Vikings; the Ottoman Empire; the Ming dynasty; the samurai; a knight; a pyramid; the "
    "Great Wall of China; the Eiffel Tower; the Colosseum; the Taj Mahal; Paris; London; New "
    "York; Tokyo; Berlin; Rome; Africa; Asia; Europe; Australia; Antarctica; Brazil; Canada; "
    "India; Japan; Mexico; Norway; the Amazon; the Nile; the Sahara; the Himalayas; the Alps; "
    "the Pacific Ocean; the Arctic; an ocean; a lake; a waterfall; a valley; a canyon; a "
    "cave; a beach; a swamp; a meadow; a savanna; the tundra; a tornado; lightning; rain; "
    "fog; wind; a tide; a wave; an earthquake; a tsunami; a flood; a drought; erosion; a "
    "rock; a mineral; a crystal; a diamond; gold; silver; copper; iron; steel; aluminum; "
    "glass; plastic; paper; wood; cotton; wool; silk; leather; rubber; concrete; oil; natural "
    "gas; coal; nuclear energy; hydrogen; oxygen; carbon; nitrogen; water; salt; an acid; a "
    "molecule; a chemical reaction; the periodic table; combustion; friction; magnetism; "
    "heat; light; energy; velocity; acceleration; pressure; density; relativity; quantum "
    "mechanics; thermodynamics; entropy; radioactivity; a cell; DNA; a gene; a protein "
    "molecule; an enzyme; a bacterium; a virus; a fungus; a plant; a seed; a leaf; a root; a "
    "flower; a tree; grass; moss; an insect; a spider; a worm; a snail; a frog; a snake; a "
    "lizard; a crocodile; a turtle; a fish; a salmon; an octopus; a jellyfish; a bird; an "
    "eagle; a parrot; a chicken; a duck; a mammal; a cat; a dog; a rabbit; a mouse; a "
    "squirrel; a fox; a wolf; a bear; a lion; a tiger; a giraffe; a zebra; a monkey; a "
    "gorilla; a kangaroo; a koala; a camel; a cow; a sheep; a goat; a pig; the heart; blood; "
    "the liver; a kidney; the stomach; the skin; a nerve; a hormone; a tooth; digestion; "
    "breathing; a fever; a cold; diabetes; cancer; an allergy; asthma; a headache; surgery; "
    "an X-ray; a hearing aid; first aid; nutrition; a calorie; fiber; sugar; fat; milk; "
    "butter; yogurt; an egg; meat; a potato; a tomato; an onion; garlic; a carrot; an apple; "
    "a banana; an orange; a lemon; a grape; wine; beer; honey; pasta; pizza; soup; a salad; a "
    "spice; pepper; cinnamon; vanilla; breakfast; cooking; baking; fishing; hunting; hiking; "
    "climbing; cycling; running; skiing; surfing; sailing; basketball; baseball; volleyball; "
    "golf; hockey; boxing; judo; gymnastics; the Olympic Games; the World Cup; a marathon; a "
    "card game; a puzzle; a crossword; a toy; a doll; a fairy tale; a myth; a legend; a "
    "fable; a short story; a biography; a diary; a letter; a dictionary; an encyclopedia; "
    "grammar; a noun; a verb; an alphabet; Latin; Spanish; French; English; Chinese; "
    "translation; rhetoric; a debate; logic; philosophy; ethics; religion; Buddhism; "
    "Christianity; Islam; Hinduism; Judaism; a church; a temple; a mosque; a festival; a "
    "wedding; a birthday; Christmas; New Year; a holiday; a vacation; tourism; a hobby; "
    "music; a symphony; an opera; a song; a drum; a flute; a trumpet; hip hop; rock music; "
    "the blues; classical music; ballet; a film; a documentary; a comedy; a tragedy; an "
    "actor; a director; a painting; a drawing; a portrait; photography; architecture; design; "
    "fashion; a park; a zoo; a farm; a vineyard; a greenhouse; compost; recycling; pollution; "
    "a carbon footprint; the ozone layer; biodiversity; an endangered species; an ecosystem; "
    "a food chain; conservation; a national park; wind power; hydropower; geothermal energy; "
    "money; a currency; a loan; a credit card; a budget; a pension; a stock; a bond; "
    "interest; economics; supply and demand; trade; globalization; unemployment; poverty; "
    "charity; leadership; teamwork; communication; creativity; curiosity; patience; courage; "
    "honesty; happiness; fear; anger; love; trust; respect; a habit; a dream; stress; "
    "intelligence; learning; education; science; mathematics; arithmetic; zero; infinity; a "
    "triangle; a circle; a polygon; symmetry; a matrix; a vector; calculus; a derivative; an "
    "integral; a logarithm; probability; a histogram; an average; a theorem; a proof; an "
    "equation; pi; physics; chemistry; biology; astronomy; geology; geography; history; "
    "archaeology; anthropology; sociology; politics; a planet; Venus; Saturn; Neptune; Pluto; "
    "a moon; an eclipse; a meteor; a nebula; a supernova; a space station; an astronaut; a "
    "spacesuit; the Big Bang; time; a time zone; a season; spring; summer; autumn; winter; "
    "the equator; latitude; a globe; GPS"
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
    more_subjects=_MORE_SUBJECTS,
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
