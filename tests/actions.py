"""Thirty actions of an assistant, and twenty requests for each, as people type them.

REPLY begins REPLY_THREAD, STOP begins STOP_TIMER and NOTE begins NOTE_DELETE; several share their first word.
"""

from __future__ import annotations

_REQUESTS = """
PLAY_MUSIC
play some jazz in the kitchen
put on the new Adele album
I want to hear something relaxing
start my workout playlist
Play "Bohemian Rhapsody", please
shuffle the songs I liked last week
can we have a bit of background music?
more Miles Davis
play that song about the yellow submarine
turn on the radio, channel 4
music for a dinner party
give me 80s pop
next track please
play the soundtrack of Amélie
I'm in the mood for techno
something by Björk, loud
wake me up with Vivaldi - no wait, play it right now
put my focus playlist on repeat
songs for a rainy Sunday
blast some AC/DC!

PLAY_VIDEO
show me the trailer of Dune
play the latest video of that cooking channel
I'd like to watch a documentary about whales
resume the film from yesterday
put the football highlights on the TV
watch episode 3 of The Crown
start the yoga video
play the cat video Tom sent me
show the recording of the Monday meeting
can you put on a cartoon for the kids
stream the rocket launch
open the tutorial on tying a bow tie
watch something funny
play the wedding clip on the big screen
show last night's news
run the slideshow video from Rome
continue season two
let's see the match again
put Blade Runner on
find a video on changing a bike tyre and play it

STOP
stop
stop that right now
be quiet please
enough!
cancel whatever you are doing
halt
shut it off
no more of this
please stop talking
end it
quit
silence
that's enough for today
abort
stop the music and everything else
ok stop
hush
never mind, stop
kill the sound
stop stop stop

STOP_TIMER
stop the timer
turn off the egg timer
cancel the ten minute timer
the pasta is ready, you can stop counting
end the countdown
kill the kitchen timer
I don't need the timer any more
stop the timer I set for the laundry
timer off
please cancel my timer
the tea timer can go
switch the running timer off
no more countdown
stop the 45 minute one
halt the timer for the cake
remove the timer
delete the timer that is still running
stop the beeping timer
make the timer stop
end the parking timer

SET_TIMER
set a timer for ten minutes
wake me in half an hour
count down 90 seconds
egg timer, six minutes
start a timer for the pasta
timer for 1 h 15
remind me in 20 min that the oven is on
25 minutes of focus time, starting now
set another timer for five minutes
pizza timer, 12 minutes
start the clock: three minutes
let me know when 40 seconds are over
set a laundry timer of an hour
two timers: 5 and 10 minutes
please time my plank for one minute
tell me when it has been a quarter of an hour
timer 7:30
set timer to 3 hours
ping me in fifteen
countdown from 100 seconds

SET_ALARM
wake me at 6:30
set an alarm for seven tomorrow
alarm at noon
I have to get up at 5
set the alarm to 8 on weekdays
wake us up at half past nine on Sunday
alarm for my flight, 3:45 am
please wake me before sunrise
set an alarm with birdsong at 7
can you get me out of bed at six?
alarm every Friday at 16:00
new alarm, quarter to eight
wake me up in time for the 9 o'clock train
set my usual alarm
ring at 22:15
early alarm tomorrow
alarm for Monday, 06:05
set two alarms, at 7 and 7:10
make sure I'm awake by ten
nap alarm at 14:20

REPLY
answer him that I'm on my way
reply yes
write back: thanks, got it
tell her I'll be there at five
respond to the last message with a thumbs up
reply to Anna that the book arrived
say no politely
answer: sorry, wrong number
write back to mum that all is well
reply with my address
tell the landlord the heating works again
let Bob know that I agree
respond that we need two more days
answer his question with 42
reply "see you soon"
send her back a thank-you
accept the invitation by reply
tell them it's fine with me
respond to the recruiter that I'm not interested
get back to Kim with a yes

REPLY_THREAD
reply to everyone in the thread that the meeting moved
answer in the thread, not in the channel
post in the thread: done
write under the original message that I fixed it
tell the whole thread we ship on Friday
respond to all in the email chain
add my answer to the thread about lunch
reply-all that I can't come
comment in the discussion that the test is flaky
continue the thread with a link to the doc
say thanks in the thread
close the thread with "resolved"
reply in thread: can you share the log?
tell all participants of the conversation that it's at 3
answer the chain about the budget
post an update below the incident message
write in the same thread that I'm out
respond to the group mail with the new address
tell everybody in that thread to restart
put my vote into the thread

IGNORE
never mind
ignore that message
forget it, that was for my daughter
that's spam, leave it
I was talking to someone else
don't do anything
skip this one
not for you
just thinking aloud
leave it as it is
disregard my last sentence
no action needed
blah blah blah
that was the TV
oops, wrong window
nothing, thanks
let it be
FYI only
hmm, interesting
you can ignore the newsletter

CONTINUE
go on
continue where you left off
keep going
please finish the story
what comes next?
carry on reading
and then?
proceed
next paragraph please
resume
don't stop there
more
go ahead with the second half
continue with the list
yes, and?
pick up where we were yesterday
keep reading aloud
on with it
finish your sentence
continue the translation

SEND_EMAIL
send an email to Julia about the invoice
mail the report to the team
write to support@example.com that the router is dead
email my boss that I'm ill today
send the photos to grandma by mail
new mail to Ben, subject holiday
email the signed contract to the lawyer
compose a mail to the whole class
send Maria the minutes
mail a reminder to all speakers
email me the recipe
drop the accountant a line with the receipts
write an email to the hotel asking for a late check-out
send my CV to the address in the ad
mail this link to Chris
please email the plumber the pictures of the leak
send out the invitation by mail
write a thank-you mail to the hosts
forward the tickets to Sam
email the school that Leo is at the dentist

CALL_CONTACT
call mum
ring the dentist
phone Peter on his mobile
dial 555 0134
call the restaurant and put it on speaker
get me my brother on the line
call back the missed number
ring up the garage
video call with Lena
phone home
call the office
try Dad again
dial the emergency number
call my best friend
give the vet a ring
call Tom Miller at work
connect me to the front desk
phone the taxi company
call her now
redial

GET_WEATHER
will it rain tomorrow?
what's the weather in Oslo
do I need a coat today
how hot will it get on Saturday
forecast for the weekend
is it windy at the coast
how cold is it outside
weather next week in Lisbon, please
will there be snow on Christmas
can I hang the laundry out
umbrella or not?
temperature in Zürich
when does the storm arrive
is it going to be sunny at the match
humidity right now
what is it like out there
chance of thunder tonight
rain radar
UV index today
is black ice expected

GET_NEWS
what happened in the world today
read me the headlines
latest news about the election
any news from the space station?
news, short version
what do the papers say
tell me the sports news
is there anything new on the strike
local news please
business headlines
today's top stories
what's new in science
read the news at eight
catch me up on current events
breaking news?
give me the tech news
news from Japan
what did I miss this morning
summary of the day's news
more about the earthquake

TURN_ON_LIGHT
lights on
switch on the lamp in the hall
it's too dark in here
turn the bedroom light on
brighten the living room
light in the garage, please
turn on the porch light at the door
desk lamp on
I can't see anything
switch on all the lights downstairs
make the kitchen bright
turn on the reading lamp
Christmas lights on!
illuminate the stairs
light up the garden
turn the bathroom mirror light on
some light, please
night light on for the baby
set the dining room lamp to 80 percent
I need light in the cellar

TURN_OFF_LIGHT
lights out
switch the lamp off
it's too bright, turn off the ceiling light
kill the lights
good night, make it dark
turn off everything in the living room that shines
bedroom light off
no light in the hall any more
dim it all the way down
switch off the garden lights
turn that lamp off
kitchen light out please
we're leaving, lights off
darkness for the film
put out the porch light
turn off the light upstairs
desk lamp off
save power, no lights
the bathroom light is still on, turn it off
fairy lights off

SET_TEMPERATURE
make it 21 degrees in here
I'm freezing, turn up the heat
heating down to 18 at night
set the thermostat to twenty
cooler please
warm the bathroom before seven
air conditioning to 23
it's too hot in the bedroom
two degrees warmer
set the living room to 22.5
turn the radiator in the study down
frost protection while we are away
heat the nursery to 20
the office should be at 19
bring the temperature up a little
make the house cosy by six
lower the heating
AC on, 24 degrees
I'd like it a bit colder
set heating to eco

ADD_TO_LIST
add milk to the shopping list
put eggs and flour on the list
we need toilet paper
add "call the bank" to my to-dos
write batteries on the hardware list
shopping: apples, pears, oats
add Dune to the films I want to see
put a new toothbrush on my list
note down: buy stamps, on the errands list
we've run out of coffee
add a cake for Saturday to the groceries
put the dentist on the to-do list
also bread
add two litres of paint
get cat food next time
append lemons
add sunscreen to the packing list
list: passport
more bin bags needed
put wine on it as well

REMOVE_FROM_LIST
take milk off the shopping list
we have enough eggs, remove them
delete "call the bank" from my to-dos
cross the flour off
remove the last item
I bought the stamps, strike them
clear bread from the groceries
no wine after all, off the list
remove everything for the party
uncheck and delete the dentist
drop batteries from the list
take sunscreen off the packing list
delete item three
we don't need paint any more
scratch the lemons
remove apples, keep pears
off with the cat food
passport is packed, remove it
cancel the cake on the list
erase the second entry

CREATE_EVENT
put dinner with Eva on Friday at eight in the calendar
schedule a meeting with Raj tomorrow at 10
book a slot for the review
new appointment: hairdresser, 3 May, 14:00
add the concert to my calendar
plan lunch with the team next Wednesday
create an event "Parents' evening"
block Thursday afternoon
block out two weeks of holiday in July
schedule the retro, biweekly
put mum's birthday in, every year
save the date: 12 September
arrange a call with Lisbon on Monday
calendar: vet, Tuesday 9 am
enter the deadline on the 30th
meeting with legal, one hour, this week
note the school trip on the 17th in the calendar
set up a coffee with Nina
add an all-day event tomorrow
reserve an hour for writing each morning

CANCEL_EVENT
cancel tomorrow's meeting
delete the dentist appointment
dinner on Friday is off
remove the concert from my calendar
call off the review
I can't make it on Thursday, cancel
drop the standup next week
clear my afternoon
the trip is not happening, take it out
cancel all of Monday
delete the event with Raj
no yoga tonight
unbook the meeting room
scrap the lunch with the team
cancel my 3 o'clock
remove the second call
the interview is cancelled, delete it
take out every retro in August
call the party off
free the slot at ten

NAVIGATE
take me home
directions to the airport
how do I get to the station
navigate to Baker Street 221b
fastest way to work
where is the next petrol station, and guide me there
route to Porto without tolls
drive to the nearest hospital
walk me to the museum
bike route along the river
show the way to Anna's
go to the parking lot at the stadium
how long to the coast by car, start the route
avoid the traffic jam
guide me back
bring me to hotel Astoria
next exit, then?
find a way around the road works
on foot to the market
to the ferry, please

TRANSLATE
how do you say thank you in Japanese
translate this letter into French
what does "Feierabend" mean
good morning in Italian, please
put the menu into English
translate "where is the station" to Spanish
what's the Dutch word for cheese
say it in Polish
translate the last message
how would a Greek say hello
into German: I'm hungry
what is 日本語 in English
translate the sign in the photo
meaning of "saudade"
French for library
turn this paragraph into Portuguese
how is "cat" written in Arabic
translate back to English
one word in Finnish: peace
what did he just say in Russian

CALCULATE
what is 17 times 23
15 percent of 84.50
square root of 2
how much is 1200 divided by 7
convert 5 miles to kilometres
add 3.99, 12.50 and 7
200 dollars in euros
what's 2 to the power of 20
how many days until Christmas
split 96 by four people
tip on 45 at 12 %
half of three quarters
350 F in Celsius
is 97 a prime
the average of 3, 9 and 12
10! please
mortgage rate on 200k over 20 years
6 dozen
how many seconds in a week
(8 - 3) * 14

SEARCH_WEB
look up the tallest building in the world
google the opening hours of the pool
who invented the zip
find a recipe for lentil soup
search for cheap flights to Athens
what is a quasar
find reviews of this vacuum cleaner
how old is the universe
search the web for a plumber nearby
when was the Magna Carta signed
look for the manual of my dishwasher
who won the cup in 1998
find pictures of red pandas
how do I remove red wine from a carpet
search "site reliability"
is there a vegan bakery in town
what's the capital of Mongolia
find out why the sky is blue
look up symptoms of hay fever
search for second-hand bikes

TAKE_PHOTO
take a picture
selfie!
snap a photo of this receipt
three, two, one, cheese
photograph the whiteboard
take a group photo in ten seconds
picture with the front camera
shoot a panorama
one more, with flash
capture the sunset
take a photo of the licence plate
make a portrait of the dog
camera, now
picture of my meal
burst of five shots
photograph the page
take a night shot
photo please
get all of us in the frame
snap it

NOTE
note that the key is under the mat
write down: Wi-Fi password is on the fridge
remember the idea with the blue door
take a note
make a memo of this
jot down 12 by 40 centimetres
new note: gift ideas
write "ask for a discount"
note to self, be kinder
keep in mind that Ida is allergic to nuts
record the meter reading 48213
memo: car park level C
save this thought
put on record that I disagreed
dictate a note
note the title of that book
write down the recipe she tells
remember I lent Max 20 euros
scribble: chapter 3 needs a twist
note: blood pressure 118 over 76

NOTE_DELETE
delete that note
throw my last memo away
erase the note on gift ideas
remove all notes from last year
I don't need the Wi-Fi note any more
get rid of the memo about the car park
delete note number 4
bin the draft
forget what I told you to remember
trash the dictated note
wipe my notes
the note with the meter reading can go
remove the memo titled ideas
clear the scratchpad
discard the recipe note
delete the note about Max
drop my note to self
erase the thing you wrote down
notes older than a month: delete
destroy that memo

ORDER_FOOD
order a pizza margherita
get us two bowls of ramen
I'm hungry, the usual please
order sushi for four
have a burger delivered
thai food tonight, number 12 and 31
order breakfast from the corner bakery
a large pepperoni and a coke
get lunch to the office at noon
curry, extra hot
reorder what we had on Sunday
vegan menu for two
ice cream delivery!
order dumplings, no shrimp
salad and soup for one
fish and chips
send for Chinese
order a birthday cake
tacos, six of them
groceries are out, order dinner

BOOK_TAXI
get me a cab
taxi to the airport at five
order a car for four people
book a ride home
I need a taxi now
pick me up at the theatre after the show
cab for grandma, Elm Street 9
a taxi with a child seat
reserve a taxi for tomorrow 4:30
call an Uber
ride to the clinic, wheelchair accessible
big car to the station, lots of luggage
book the return ride too
taxi for Smith
get someone to drive me
cab from here to the Hilton
share a ride downtown
a lift to the party
airport transfer on Sunday
electric taxi, please
"""

REQUESTS: dict[str, tuple[str, ...]] = {
    action: tuple(requests) for action, *requests in (block.split("\n") for block in _REQUESTS.strip().split("\n\n"))
}
"""Action -> the requests that mean it."""

ACTIONS = tuple(REQUESTS)

assert len(ACTIONS) == 30, len(ACTIONS)
assert all(len(requests) == 20 for requests in REQUESTS.values()), {a: len(r) for a, r in REQUESTS.items()}
