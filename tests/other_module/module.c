/* A module that runs commands of the lock module on every change of a key, within the notification: the lock module may be in the
 * middle of a command. The types and functions of the module API that it needs are declared here. */
#include <stddef.h>
#include <string.h>

typedef struct Ctx Ctx;
typedef struct String String;
typedef struct Reply Reply;

static void (*SetModuleAttribs)(Ctx *, const char *, int, int);
static int (*SubscribeToKeyspaceEvents)(Ctx *, int, int (*)(Ctx *, int, const char *, String *));
static Reply *(*Call)(Ctx *, const char *, const char *, ...);
static void (*FreeCallReply)(Reply *);

static int depth;

static void call(Ctx *ctx, const char *command, String *key, const char *owner) {
    Reply *reply = owner ? Call(ctx, command, "!sc", key, owner) : Call(ctx, command, "!s", key);
    if (reply) FreeCallReply(reply);
}

static int changed(Ctx *ctx, int type, const char *event, String *key) {
    (void)type;
    if (depth) return 0; /* its own commands change keys, too */
    depth++;
    if (!strcmp(event, "lock.released")) {
        Reply *reply = Call(ctx, "DEL", "!c", "another key");
        if (reply) FreeCallReply(reply);
    }
    call(ctx, "lock.info", key, NULL);
    call(ctx, "lock.acquire", key, "other_module");
    call(ctx, "lock.waiters", key, NULL);
    call(ctx, "lock.release", key, "other_module");
    depth--;
    return 0;
}

int RedisModule_OnLoad(Ctx *ctx, void **argv, int argc) {
    (void)argv, (void)argc;
    int (*api)(const char *, void *) = (int (*)(const char *, void *))((void **)ctx)[0];
    enum { GENERIC = 1 << 2, STRING = 1 << 3, HASH = 1 << 6, EXPIRED = 1 << 8, EVICTED = 1 << 9, MODULE = 1 << 13 };
    if (api("RedisModule_SetModuleAttribs", &SetModuleAttribs) || api("RedisModule_Call", &Call) ||
        api("RedisModule_SubscribeToKeyspaceEvents", &SubscribeToKeyspaceEvents) ||
        api("RedisModule_FreeCallReply", &FreeCallReply))
        return 1;
    SetModuleAttribs(ctx, "other_module", 1, 1);
    return SubscribeToKeyspaceEvents(ctx, GENERIC | STRING | HASH | EXPIRED | EVICTED | MODULE, changed);
}
