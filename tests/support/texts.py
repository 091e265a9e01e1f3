"""A short text, written for the tests."""

FERRY = """The ferry to the outer island leaves at seven, if the fog allows it. Marta, who has run the ticket office
for thirty years, keeps a ledger in which she writes down each crossing, how many people were on board, what the sea
was like, and one odd thing that she saw. On most days the odd thing is a bird. On the ninth of March it was a piano.

It belonged to a schoolteacher named Ilse Brandt, who had been given the post on the island two weeks before and who
would not leave the instrument behind. Four men rolled it over the gangway on planks, and the captain asked whether
she knew how much salt air does to felt and wire. She said that she did, and that she would tune it twice as often.
The crossing took fifty minutes. Somewhere past the second buoy she opened the lid, sat down on a crate of onions, and
played a slow waltz, and the passengers, who were used to talking about prices and the weather, said nothing until the
harbour wall came out of the mist.

In the years that followed the piano was heard every evening from the open windows of the school. Children who had
never seen a city learnt to read music before they learnt to mend nets. When a storm took the roof in the winter of
the long ice, the whole village carried the piano to the chapel, and there it stayed. Marta's ledger notes the roof in
one line and the piano in seven.

Ilse Brandt taught for twenty-six years. The last entry that mentions her is short: calm sea, eleven people on board,
and a woman with one small suitcase, who asked the captain to stop the engine beyond the second buoy, listened for a
while, and then told him that he could go on.

What did the schoolteacher bring to the island, and what became of it?"""
