"""The fixed texts on which lossy options are judged: prose, instructions, code, tables, dialogue, other languages."""

from __future__ import annotations

TEXTS = (
    "The lift begins at the edge of the village, behind the bakery. In summer it carries hikers and their dogs; in "
    "winter it carries everyone. It never stops for boarding. You stand on the line, look over your shoulder, and sit "
    "down when the chair touches the back of your knees. My grandmother rode it every Sunday until she was ninety. She "
    "said that the trick was not to be quick but to be ready, and that most things in life were like that.",
    "To change a bicycle tube, first let out the air that is left. Push one side of the tyre over the rim with two "
    "levers, pull out the tube, and feel along the inside of the tyre for the thorn or piece of glass that made the "
    "hole. Put a little air into the new tube so that it keeps its shape, lay it into the tyre, and press the tyre "
    "back over the rim with your thumbs, starting at the side opposite the valve. Pump it up slowly.",
    "def merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n"
    "        if left[i] <= right[j]:\n            result.append(left[i])\n            i += 1\n        else:\n"
    "            result.append(right[j])\n            j += 1\n    return result + left[i:] + right[j:]\n\n\n"
    "def merge_sort(items):\n    if len(items) < 2:\n        return items\n    middle = len(items) // 2\n"
    "    return merge(merge_sort(items[:middle]), merge_sort(items[middle:]))\n",
    "| City | Country | Population | Founded |\n|---|---|---|---|\n| Lisbon | Portugal | 545,000 | 1200 BC |\n"
    "| Vienna | Austria | 1,980,000 | 1st century |\n| Oslo | Norway | 717,000 | 1040 |\n| Prague | Czechia | 1,357,000"
    " | 9th century |\n| Zurich | Switzerland | 443,000 | 15 BC |\n",
    '"Where have you been?" asked the old man without looking up from his newspaper.\n"At the harbour," said the girl. '
    '"They were unloading oranges, and one of the boxes broke."\n"And you helped them pick up the oranges."\n"I '
    'did."\n"And how many of them are in your pockets?"\nShe thought about it for a while. "Four," she said. "But one '
    'of them is for you."',
    "Photosynthesis turns light into chemical energy. In the first stage, which takes place in the membranes of the "
    "chloroplast, light splits water into oxygen, protons and electrons; the electrons pass along a chain of proteins, "
    "and the energy they give up is stored in two carriers, ATP and NADPH. In the second stage these carriers pay for "
    "the making of sugar from carbon dioxide. The oxygen that we breathe is a by-product of the first stage.",
    "Dear Ms Keller,\n\nThank you for your letter of 3 March about the noise from the workshop below your flat. We "
    "have spoken with the tenant, who was not aware that the machines can be heard on the second floor. From next "
    "Monday they will be used only between nine and five, and the largest one will be moved to the other side of the "
    "building. Please let us know in two weeks whether this has helped.\n\nYours sincerely,\nThe house management",
    '{"name": "chairlift", "version": "0.1.0", "seats": 64, "policy": "continuous", "limits": {"waiting": 1024, '
    '"prompt_tokens": 8192, "timeout_s": 600}, "routes": ["/v1/chat/completions", "/v1/completions", "/v1/models", '
    '"/health", "/metrics"], "keys": [{"tenant": "alice", "weight": 2}, {"tenant": "bob", "weight": 1}]}',
    "The train from Bern reaches the pass at noon. Der Zug aus Bern erreicht den Pass am Mittag. Le train de Berne "
    "atteint le col à midi. Il treno da Berna raggiunge il passo a mezzogiorno. El tren de Berna llega al puerto al "
    "mediodía. Four languages are spoken in this country, and the conductor says good day in each of them.",
    'Question: A farmer has 17 sheep, and all but 9 run away. How many are left?\nAnswer: 9. The words "all but 9" '
    "mean that 9 did not run away.\n\nQuestion: A train travels 60 miles in an hour and a half. What is its average "
    "speed?\nAnswer: 40 miles per hour, because 60 divided by 1.5 is 40.\n\nQuestion: I have three apples and eat one "
    "every other day, beginning today. On which day is the last one gone?\nAnswer: On the fifth day.",
    "In the spring of 1906 the council voted by eleven to ten to build the dam. The eleventh vote was that of a "
    "schoolteacher who had never spoken in the council before and never spoke there again. He explained himself only "
    "in his diary: the river had taken two of his pupils in the flood of 1899, and he could not vote for the river. "
    "The dam still stands. The lake behind it is named after the mayor who had voted against it.",
    "SELECT customers.name, COUNT(orders.id) AS num_orders, SUM(orders.total) AS revenue\nFROM customers\nLEFT JOIN "
    "orders ON orders.customer_id = customers.id AND orders.created_at >= '2026-01-01'\nGROUP BY customers.id, "
    "customers.name\nHAVING SUM(orders.total) > 1000\nORDER BY revenue DESC\nLIMIT 20;\n",
)
