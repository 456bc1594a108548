/* Handles: a place in a table and the number of its use, so that one that was released is known as such. */
#include "native.h"

#include <stdlib.h>

enum { PLACE_BITS = 20 };

typedef struct { void *object; int kind; uintptr_t use; } place_t;

static place_t *places = NULL;
static uintptr_t room = 0;

static place_t *place_of(mps_handle handle)
{
    uintptr_t word = (uintptr_t)handle, at = word & (((uintptr_t)1 << PLACE_BITS) - 1);
    if (at == 0 || at > room) return NULL;
    place_t *place = &places[at - 1];
    return place->object != NULL && place->use == word >> PLACE_BITS ? place : NULL;
}

static uintptr_t free_place(void)
{
    uintptr_t at = 0;
    while (at < room && places[at].object != NULL) at++;
    return at;
}

int object_room(const char *call)
{
    if (free_place() < room) return MPS_OK;
    uintptr_t more = room ? 2 * room : 16;
    place_t *grown = more >> PLACE_BITS ? NULL : realloc(places, more * sizeof *grown);
    if (grown == NULL) return fail(MPS_ERR_MEMORY, "%s: no memory for one more handle", call);
    for (uintptr_t i = room; i < more; i++) grown[i].object = NULL, grown[i].use = 0;
    places = grown;
    room = more;
    return MPS_OK;
}

mps_handle object_made(int kind, void *object)
{
    uintptr_t at = free_place();
    places[at].object = object;
    places[at].kind = kind;
    return (mps_handle)(++places[at].use << PLACE_BITS | (at + 1));
}

void *object_of(mps_handle handle, int kind)
{
    place_t *place = place_of(handle);
    return place != NULL && place->kind == kind ? place->object : NULL;
}

int object_kind(mps_handle handle)
{
    place_t *place = place_of(handle);
    return place != NULL ? place->kind : 0;
}

void object_dropped(mps_handle handle)
{
    place_t *place = place_of(handle);
    if (place != NULL) place->object = NULL;
}
