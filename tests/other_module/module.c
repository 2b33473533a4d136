/* A module that runs commands of the lock module on every change of a key, within the notification: the lock module may be in the
 * middle of a command. When "another thread" is changed, it also runs one on a thread of its own, and writes the error to "error".
 * The types and functions of the module API that it needs are declared here. */
#include <pthread.h>
#include <stddef.h>
#include <string.h>

typedef struct Ctx Ctx;
typedef struct String String;
typedef struct Reply Reply;

static void (*SetModuleAttribs)(Ctx *, const char *, int, int);
static int (*SubscribeToKeyspaceEvents)(Ctx *, int, int (*)(Ctx *, int, const char *, String *));
static Reply *(*Call)(Ctx *, const char *, const char *, ...);
static void (*FreeCallReply)(Reply *);
static const char *(*CallReplyStringPtr)(Reply *, size_t *);
static Ctx *(*GetThreadSafeContext)(void *);
static void (*ThreadSafeContextLock)(Ctx *), (*ThreadSafeContextUnlock)(Ctx *), (*FreeThreadSafeContext)(Ctx *);
static const char *(*StringPtrLen)(const String *, size_t *);

static int depth;

static void call(Ctx *ctx, const char *command, String *key, const char *owner) {
    Reply *reply = owner ? Call(ctx, command, "!sc", key, owner) : Call(ctx, command, "!s", key);
    if (reply) FreeCallReply(reply);
}

static void *run_on_thread(void *unused) {
    Ctx *ctx = GetThreadSafeContext(NULL);
    ThreadSafeContextLock(ctx);
    depth++;
    Reply *reply = Call(ctx, "lock.acquire", "!cc", "k", "thread"), *done;
    size_t length;
    const char *error = CallReplyStringPtr(reply, &length);
    done = Call(ctx, "SET", "!cb", "error", error ? error : "none", error ? length : 4);
    FreeCallReply(done);
    FreeCallReply(reply);
    depth--;
    ThreadSafeContextUnlock(ctx);
    FreeThreadSafeContext(ctx);
    return unused;
}

static int is_named(String *key, const char *name) {
    size_t length;
    const char *text = StringPtrLen(key, &length);
    return length == strlen(name) && !memcmp(text, name, length);
}

static int changed(Ctx *ctx, int type, const char *event, String *key) {
    (void)type;
    if (depth) return 0; /* its own commands change keys, too */
    if (is_named(key, "another thread")) {
        pthread_t thread;
        return pthread_create(&thread, NULL, run_on_thread, NULL) || pthread_detach(thread);
    }
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
        api("RedisModule_FreeCallReply", &FreeCallReply) || api("RedisModule_CallReplyStringPtr", &CallReplyStringPtr) ||
        api("RedisModule_GetThreadSafeContext", &GetThreadSafeContext) ||
        api("RedisModule_ThreadSafeContextLock", &ThreadSafeContextLock) ||
        api("RedisModule_ThreadSafeContextUnlock", &ThreadSafeContextUnlock) ||
        api("RedisModule_FreeThreadSafeContext", &FreeThreadSafeContext) ||
        api("RedisModule_StringPtrLen", &StringPtrLen))
        return 1;
    SetModuleAttribs(ctx, "other_module", 1, 1);
    return SubscribeToKeyspaceEvents(ctx, GENERIC | STRING | HASH | EXPIRED | EVICTED | MODULE, changed);
}
